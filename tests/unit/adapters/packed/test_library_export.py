"""Exports: what they hold computes what workers compute."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora

from adapters.catalog.described import revision_as_json
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterNotFound
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.model.serving import EngineDtype
from adapters.store import RevisionNotStored, open_store
from adapters.verification.reference import UNLIMITED


def library_in(folder: Path, base: BaseModel, limits: Limits, dtype: EngineDtype) -> AdapterLibrary:
    catalog = SqlCatalog.open(f"sqlite:///{folder}/catalog.db")
    return AdapterLibrary(catalog, open_store(f"file://{folder}/store"), base, limits, dtype)


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def library(request, base, limits, tmp_path) -> AdapterLibrary:
    return library_in(tmp_path, base, limits, request.param)


def test_an_export_of_the_serving_dtype_and_scale_1_is_the_same_revision(library, base, limits, tmp_path):
    source = write_random_lora(tmp_path / "source", base, 1, rank=4, alpha=4, dtype=library.dtype)
    imported = library.import_directory("bot", source)
    library.export("bot", tmp_path / "out")
    assert revision_id_of(read_adapter(tmp_path / "out", base, limits)) == imported.revision_id
    assert library.import_directory("bot", tmp_path / "out").number == 1


def test_what_cannot_be_exported_leaves_nothing(library, base, tmp_path):
    imported = library.import_directory("bot", write_random_lora(tmp_path / "source", base, 1, rank=4))
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="name a directory that does not"):
        library.export("bot", tmp_path / "there")
    with pytest.raises(AdapterNotFound):
        library.export("bot@prod", tmp_path / "out")
    library.store.delete(imported.revision_id)
    with pytest.raises(RevisionNotStored):
        library.export("bot", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_go_in_and_out(dtype, moe_base, tmp_path):
    """The whole way: directory, packed in the store, catalog's row, export, import of the export."""
    library = library_in(tmp_path, moe_base, UNLIMITED, dtype)
    source = write_random_expert_lora(
        tmp_path / "source", moe_base, 1, attention=["v_proj"], rank=4, alpha=4, dtype=dtype, experts=[0, 1, 3]
    )
    imported = library.import_directory("bot", source)
    found = library.catalog.resolve("bot")
    assert found.manifest == imported.manifest
    assert "experts.down_proj" in found.manifest.target_modules
    assert found.manifest.experts[0].experts == ((0, 1), (3, 3))
    why = {rank: revision_as_json(found, rank)["not_served"] for rank in (0, 3, 4)}
    assert "it has LoRA on experts" in why[0]
    assert "rank 4 on experts, and workers take at most 3" in why[3]
    assert why[4] == ""
    library.export("bot", tmp_path / "out")
    assert library.import_directory("bot", tmp_path / "out") == imported  # scale 1, serving dtype: the same revision
    before, after = (read_adapter(path, moe_base, UNLIMITED) for path in (source, tmp_path / "out"))
    for place, factors in before.experts.items():
        assert np.array_equal(factors.a, after.experts[place].a)
        assert np.array_equal(factors.b, after.experts[place].b)


def test_our_own_layout_of_experts(tmp_path, moe_base):
    source = write_random_expert_lora(tmp_path / "source", moe_base, 1, rank=2, experts=[1, 2])
    library = library_in(tmp_path, moe_base, UNLIMITED, "float32")
    library.import_directory("bot", source)
    library.export("bot", tmp_path / "out")
    path = tmp_path / "out" / "adapter.safetensors"
    tensors = load_file(path)
    spoiled = {
        "lora.0.experts.99.up_proj.A": (AdapterIncompatible, "there are experts 0 to"),
        "lora.0.experts.1.q_proj.A": (AdapterIncompatible, "each with gate_proj"),
        "lora.0.gate_proj.A": (AdapterIncompatible, "modules of a layer"),
        "lora.0.experts.up_proj.A": (AdapterMalformed, "is not known"),
        "lora.0.experts.0.up_proj.A": (AdapterMalformed, "it must have A, B"),
    }
    for name, (error, says) in spoiled.items():
        save_file({name if old == "lora.0.experts.1.up_proj.A" else old: t for old, t in tensors.items()}, path)
        with pytest.raises(error, match=says):
            read_adapter(tmp_path / "out", moe_base, UNLIMITED)
