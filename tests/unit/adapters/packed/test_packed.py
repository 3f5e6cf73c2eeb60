import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.adapters.serving_form import ServingForm

from adapters.errors import AdapterIncompatible
from adapters.formats import read_adapter
from adapters.formats.folder import Limits
from adapters.formats.safetensors_file import encode
from adapters.model.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_module
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter, LoraFactors, ReftFactors, bfloat16_to_float32, frozen_array
from adapters.packed import PACKED_NAME, read_packed, write_for_engine, write_packed

DTYPES = ["float32", "bfloat16", "float16"]


def stored(values: np.ndarray, dtype: str) -> bytes:
    return encode(values.astype(np.float32), dtype)[2]


def bits_of(tensor) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_holds(adapter: Adapter, base: BaseModel, dtype: str, folder: Path) -> None:
    """Bit for bit: factors padded with zeros to one rank, scales folded into B, siblings of stacks whole or absent."""
    write_for_engine(adapter, base, dtype, folder / "engine")
    packed = read_packed(folder / "engine" / PACKED_NAME)
    packed.check_digest()
    packed.check_fits(base)
    form, rank = ServingForm.read(folder / "engine"), adapter.max_rank
    stacks = (*FUSED_MODULES.values(), ("o_proj",), ("down_proj",))
    touched = {
        (layer, part)
        for stack in stacks
        for layer in range(base.num_layers)
        if any((layer, module) in adapter.lora for module in stack)
        for part in stack
    }
    assert form.lora.keys() == {
        name_of_module(layer, part)
        for layer in range(base.num_layers)
        for stack in stacks
        if any((other, module) in adapter.lora for other in range(base.num_layers) for module in stack)
        and any((layer, module) in adapter.lora for module in stack)
        for part in stack
    }
    for layer, part in touched:
        size_out, size_in = base.shape_of(part)
        a, b = np.zeros((rank, size_in)), np.zeros((size_out, rank))
        if (factors := adapter.lora.get((layer, part))) is not None:
            a[: factors.rank] = factors.a
            b[:, : factors.rank] = factors.b.astype(np.float64) * factors.scale
        found_a, found_b = form.lora[name_of_module(layer, part)]
        assert bits_of(found_a) == stored(a, dtype), (layer, part)
        assert bits_of(found_b) == stored(b.astype(np.float32) + np.float32(0), dtype), (layer, part)  # no -0.0
    assert form.reft.keys() == adapter.reft.keys()
    for layer, own in adapter.reft.items():
        parts = (own.a, own.b * np.float32(own.scale) + np.float32(0), own.bias)
        for found, wanted in zip(form.reft[layer], parts, strict=True):
            assert bits_of(found[: own.rank]) == stored(wanted, dtype), layer
            assert not found[own.rank :].any()
    assert packed.metadata.revision_id == revision_id_of(adapter)
    assert packed.metadata.manifest == Manifest.of(adapter).to_json()
    assert (packed.metadata.positions, packed.metadata.dtype) == (adapter.positions, dtype)
    config = json.loads((folder / "engine" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == rank
    assert set(config["target_modules"]) == {part for _, part in touched}
    assert config["prelude"] == {
        "revision_id": revision_id_of(adapter),
        "dtype": dtype,
        "positions": adapter.positions,
    }


@st.composite
def adapters(draw, base: BaseModel) -> Adapter:
    """Any adapter of the base model: each projection of each layer with a rank and a scale of its own, or without."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks = st.one_of(st.just(0), st.integers(1, 5))
    scales = st.one_of(st.just(1.0), st.just(0.0), st.floats(-8, 8))
    largest = draw(st.sampled_from([1e-30, 1e-6, 1.0, 100.0]))

    def values(*shape: int) -> np.ndarray:
        return frozen_array(generator.normal(0, largest, shape) * generator.integers(0, 2, shape))

    def lora(module: str, rank: int) -> LoraFactors:
        size_out, size_in = base.shape_of(module)
        return LoraFactors(values(rank, size_in), values(size_out, rank), draw(scales), "float32")

    def reft(rank: int) -> ReftFactors:
        return ReftFactors(values(rank, base.hidden), values(rank, base.hidden), values(rank), draw(scales), "float32")

    places = [(layer, module) for layer in range(base.num_layers) for module in MODULES]
    chosen = {place: rank for place in places if (rank := draw(ranks))}
    streams = {layer: rank for layer in range(base.num_layers) if (rank := draw(ranks))}
    if not chosen and not streams:
        streams = {0: 1}
    return Adapter(
        lora={(layer, module): lora(module, rank) for (layer, module), rank in chosen.items()},
        reft={layer: reft(rank) for layer, rank in streams.items()},
        positions=draw(st.sampled_from(["prefill", "all"])),
        base_fingerprint=base.fingerprint,
        num_file_bytes=0,
    )


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_adapter_is_held(data, dtype, base):
    adapter = data.draw(adapters(base))
    with tempfile.TemporaryDirectory() as folder:
        assert_holds(adapter, base, dtype, Path(folder))


def test_tensors_are_as_the_engine_stacks_them(base, limits, tmp_path):
    adapter = read_adapter(write_random_mixed(tmp_path / "source", base, 1, modules=MODULES, rank=4), base, limits)
    write_packed(adapter, base, "bfloat16", tmp_path / "packed")
    packed = read_packed(tmp_path / "packed")
    assert {name: array.shape for name, array in packed.tensors.items()} == {
        "lora.qkv_proj.a": (3, 12, 32), "lora.qkv_proj.b": (3, 96, 4),
        "lora.o_proj.a": (3, 4, 48), "lora.o_proj.b": (3, 32, 4),
        "lora.gate_up_proj.a": (3, 8, 32), "lora.gate_up_proj.b": (3, 96, 4),
        "lora.down_proj.a": (3, 4, 48), "lora.down_proj.b": (3, 32, 4),
        "reft.a": (3, 4, 32), "reft.b": (3, 32, 4), "reft.bias": (3, 4),
    }  # fmt: skip
    a, b = (bfloat16_to_float32(packed.tensors[f"lora.qkv_proj.{factor}"]) for factor in "ab")
    for number, (part, rows) in enumerate({"q_proj": (0, 48), "k_proj": (48, 72), "v_proj": (72, 96)}.items()):
        factors = adapter.lora[1, part]
        np.testing.assert_allclose(a[1, 4 * number : 4 * number + 4], factors.a, rtol=2**-8)
        np.testing.assert_allclose(b[1, slice(*rows)], factors.b * factors.scale, rtol=2**-8)
    reft = adapter.reft[2]
    np.testing.assert_allclose(bfloat16_to_float32(packed.tensors["reft.b"])[2], reft.b.T * reft.scale, rtol=2**-7)


def test_arrays_are_views_of_the_file_that_nobody_can_write_to(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "source", base, 1), base, limits)
    write_packed(adapter, base, "float32", tmp_path / "packed")
    packed = read_packed(tmp_path / "packed")
    whole = np.frombuffer(packed.data, np.uint8)
    for array in packed.tensors.values():
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable
    assert packed.num_bytes == sum(array.nbytes for array in packed.tensors.values())
    (tmp_path / "packed").unlink()
    packed.check_digest()  # a deleted file stays mapped


def test_the_same_adapter_gives_the_same_bytes(base, limits, tmp_path):
    source = write_random_mixed(tmp_path / "source", base, 1)
    digests = set()
    for name in ("first", "second"):
        write_packed(read_adapter(source, base, limits), base, "bfloat16", tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_what_does_not_fit_is_refused_and_nothing_is_written(base, tmp_path):
    limits = Limits(max_rank=16)
    adapter = read_adapter(write_random_lora(tmp_path / "source", base, 1, alpha=8e6), base, limits)
    with pytest.raises(
        AdapterIncompatible, match=r"layer 0 down_proj: the scaled B has a value of .* too large for float16"
    ):
        write_packed(adapter, base, "float16", tmp_path / "packed")
    with pytest.raises(AdapterIncompatible, match=base.fingerprint):
        write_packed(replace(adapter, base_fingerprint="0" * 16), base, "float32", tmp_path / "packed")
    reft = read_adapter(write_random_reft(tmp_path / "reft", base, 1, scale=1e38), base, limits)
    with pytest.raises(AdapterIncompatible, match="layer 0 ReFT: the scaled B"):
        write_packed(replace(reft, reft={0: replace(reft.reft[0], scale=1e39)}), base, "bfloat16", tmp_path / "packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reft", "source"]


def test_a_failure_to_write_leaves_what_was_there(base, limits, tmp_path, monkeypatch):
    first = read_adapter(write_random_lora(tmp_path / "a", base, 1), base, limits)
    second = read_adapter(write_random_lora(tmp_path / "b", base, 2), base, limits)
    write_packed(first, base, "float32", tmp_path / "packed")

    def half_written(path, *_):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("adapters.packed.writer.write_streamed", half_written)
    with pytest.raises(OSError, match="disk full"):
        write_packed(second, base, "float32", tmp_path / "packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "packed"]
    assert read_packed(tmp_path / "packed").metadata.revision_id == revision_id_of(first)


def test_values_too_large_once_scaled_or_rounded(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, 1, modules=["q_proj"]), base, limits)
    (key, factors), *_ = adapter.lora.items()
    edge = replace(factors, b=frozen_array(np.full_like(factors.b, 3.4e38)))
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(AdapterIncompatible, match="too large for"):
            write_packed(replace(adapter, lora={key: replace(edge, scale=2.0)}), base, dtype, tmp_path / "packed")
    # 3.4e38 is a float32 but rounds to infinity as a bfloat16.
    single = replace(adapter, lora={key: replace(edge, scale=1.0)})
    write_packed(single, base, "float32", tmp_path / "packed")
    with pytest.raises(AdapterIncompatible, match="too large for bfloat16"):
        write_packed(single, base, "bfloat16", tmp_path / "packed16")
