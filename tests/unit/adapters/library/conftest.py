"""What tests of the library share."""

import pytest
from support.adapters.random_adapters import write_random_lora

from adapters.library import AdapterLibrary
from adapters.store import open_store


@pytest.fixture
def library(catalog, base, limits, tmp_path) -> AdapterLibrary:
    """An empty one, once on each kind of database."""
    return AdapterLibrary(catalog, open_store(f"file://{tmp_path}/store"), base, limits, "bfloat16")


@pytest.fixture
def lora(base, tmp_path):
    """Makes the directory of an adapter; the same seed, the same content."""

    def make(seed: int, **options):
        return write_random_lora(tmp_path / f"lora-{seed}", base, seed, modules=["q_proj"], rank=4, **options)

    return make
