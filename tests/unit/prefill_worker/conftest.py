"""Fixtures: a base model, packed adapters and a store that holds them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.adapters.held_adapters import SIZES, StoredAdapters

from adapters.model.base_model import BaseModel


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "config.json").write_text(json.dumps(SIZES))
    return BaseModel.read(folder)


@pytest.fixture(scope="session")
def packed_adapters(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed files of twelve adapters of one size, by revision id."""
    return StoredAdapters.pack_many(base, tmp_path_factory.mktemp("packed"), 12)


@pytest.fixture
def stored(base: BaseModel, packed_adapters: dict[str, Path], tmp_path: Path) -> StoredAdapters:
    """A store that holds all of them, one per test."""
    return StoredAdapters(base, packed_adapters, tmp_path / "store")


@pytest.fixture
def small_disk(tmp_path: Path, packed_adapters: dict[str, Path]) -> Iterator[Path]:
    """A file system with room for a little more than two adapters."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = 2 * next(iter(packed_adapters.values())).stat().st_size + 16_000
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
