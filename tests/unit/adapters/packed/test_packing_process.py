"""Packing in a process of its own: the same file as here, within limits, and nothing of it reaches this process."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from support.adapters.damaged_adapters import write_large_header
from support.adapters.random_adapters import write_random_lora, write_random_mixed

from adapters.errors import AdapterMalformed, AdapterTooLarge, HostExhausted, TenantFull
from adapters.formats import Limits
from adapters.model.base_model import BaseModel
from adapters.packed import packing, packing_process
from adapters.packed.packing import PackedSize, pack_directory
from adapters.packed.packing_process import pack_in_process

LIMITS = Limits()


def nothing(_size: PackedSize) -> None:
    pass


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process(os.getpid()).children() if packing_process.__name__ in each.cmdline()]


@pytest.mark.parametrize("write", [write_random_lora, write_random_mixed])
def test_it_packs_the_same_file(write, base: BaseModel, tmp_path: Path) -> None:
    directory = write(tmp_path / "adapter", base, 1)
    sizes = [
        pack(directory, tmp_path / pack.__name__, base, LIMITS, "bfloat16", nothing)
        for pack in (pack_directory, pack_in_process)
    ]
    assert sizes[0] == sizes[1]
    packed = (tmp_path / "pack_in_process").read_bytes()
    assert packed == (tmp_path / "pack_directory").read_bytes()
    assert len(packed) == sizes[0].num_bytes


def test_a_large_header_is_parsed_there(base: BaseModel, tmp_path: Path, monkeypatch) -> None:
    parsed_here = []
    monkeypatch.setattr(packing, "read_adapter", lambda *arguments: parsed_here.append(arguments))
    with pytest.raises(AdapterMalformed, match="layer"):
        pack_in_process(
            write_large_header(tmp_path / "adapter", base), tmp_path / "packed", base, LIMITS, "float32", nothing
        )
    assert parsed_here == []
    assert not (tmp_path / "packed").exists()


def test_memory_is_bounded(base: BaseModel, tmp_path: Path, monkeypatch) -> None:
    directory = write_large_header(tmp_path / "adapter", base)
    monkeypatch.setattr(packing_process, "_MEMORY_BYTES", 64 * 1024**2)
    with pytest.raises(AdapterTooLarge, match="bytes of memory"):
        pack_in_process(directory, tmp_path / "packed", base, LIMITS, "float32", nothing)


def test_time_is_bounded(base: BaseModel, tmp_path: Path, monkeypatch) -> None:
    directory = write_random_lora(tmp_path / "adapter", base, 1)
    monkeypatch.setattr(packing_process, "_WALL_PER_CPU", 0)
    with pytest.raises(HostExhausted, match="ended by SIGKILL"):
        pack_in_process(directory, tmp_path / "packed", base, LIMITS, "float32", nothing)


def test_whoever_asks_may_refuse_before_a_byte_is_written(base: BaseModel, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "not for it")
    seen: list[dict[str, str]] = []

    def refuse(size: PackedSize) -> None:
        [child] = children()
        seen.append(child.environ())
        assert size.num_bytes > 0
        raise TenantFull("no")

    target = tmp_path / "folder" / "packed"
    directory = write_random_lora(tmp_path / "adapter", base, 1)
    with pytest.raises(TenantFull):
        pack_in_process(directory, target, base, LIMITS, "float32", refuse)
    assert not target.parent.exists()
    assert children() == []
    assert "PATH" in seen[0]
    assert "DATABASE_PASSWORD" not in seen[0]


@pytest.mark.parametrize("pack", [pack_directory, pack_in_process])
def test_padding_counts(pack, base: BaseModel, tmp_path: Path) -> None:
    """One projection of rank 64 among others of rank 1: packing pads all to 64."""
    directory = write_random_lora(tmp_path / "adapter", base, 1, rank=1, rank_pattern={"layers.0.self_attn.q_proj": 64})
    num_bytes = sum(file.stat().st_size for file in directory.iterdir())
    limits = Limits(max_bytes=2 * num_bytes)
    sizes: list[PackedSize] = []
    with pytest.raises(AdapterTooLarge, match="padded to the largest rank, 64"):
        pack(directory, tmp_path / "packed", base, limits, "float32", sizes.append)
    assert sizes == []
    assert not (tmp_path / "packed").exists()


def test_the_request_has_all_of_the_base_model(moe_dir: Path) -> None:
    base = BaseModel.read(moe_dir)
    assert base.experts is not None
    assert packing_process._base_model(json.loads(json.dumps(asdict(base)))) == base
