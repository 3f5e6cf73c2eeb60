"""Fixtures: packed adapters, a store that holds them, and a worker."""

import subprocess
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from support.adapters.held_adapters import StoredAdapters, Worker, running_worker
from support.clusters.running_agent import RunningAgent, running_agent

from adapters.model.base_model import BaseModel


@pytest.fixture(scope="session")
def packed_adapters(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed files of twelve adapters of one size, by revision id."""
    return StoredAdapters.pack_many(base, tmp_path_factory.mktemp("packed"), 12)


@pytest.fixture
def stored(base: BaseModel, packed_adapters: dict[str, Path], tmp_path: Path) -> StoredAdapters:
    """A store that holds all of them, one per test."""
    return StoredAdapters(base, packed_adapters, tmp_path / "store")


@pytest.fixture
def worker(stored: StoredAdapters, tmp_path: Path) -> AbstractAsyncContextManager[Worker]:
    """One that holds adapters of the store; a test gets it running."""
    return running_worker(stored, tmp_path)


@pytest.fixture
def running(stored: StoredAdapters, tmp_path: Path) -> AbstractAsyncContextManager[RunningAgent]:
    """A unified worker's agent over gRPC; a test gets it running."""
    return running_agent(stored, tmp_path)


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
