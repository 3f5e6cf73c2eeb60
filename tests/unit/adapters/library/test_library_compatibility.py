"""A catalog and a store that 0.1.0 wrote (data/0.1.0/generate.py) give the same answers now, and can be changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from adapters.catalog.described import adapter_as_json, details_as_json, move_as_json, revision_as_json
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterNotFound, CatalogConflict
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import RevisionNotStored, open_store
from samples.random_adapters import write_random_lora

DATA = Path(__file__).parent / "data" / "0.1.0"
ANSWERS = json.loads((DATA / "answers.json").read_text())
STORED = [reference for reference, revision in ANSWERS["resolved"].items() if revision["stored"]]


@pytest.fixture
def library(tmp_path: Path) -> Iterator[AdapterLibrary]:
    """Over a copy: opening a catalog brings its tables up to date."""
    folder = shutil.copytree(DATA, tmp_path / "0.1.0")
    catalog = SqlCatalog.open(f"sqlite:///{folder}/catalog.db")
    store, base = open_store(f"file://{folder}/store"), BaseModel.read(folder / "model")
    yield AdapterLibrary(catalog, store, base, Limits(), "bfloat16", "base")
    catalog.close()


def check_same(found: Any, expected: Any) -> None:
    """The answer is 0.1.0's; objects may have more fields than it knew."""
    if isinstance(expected, dict):
        assert expected.keys() <= found.keys()
        for key, value in expected.items():
            check_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    else:
        assert (found.isoformat() if isinstance(found, datetime) else found) == expected


def test_the_data_have_every_state() -> None:
    """Else the tests below would show less than they say."""
    assert {each["tenant"] for each in ANSWERS["listed"]} == {"default", "acme"}
    assert {kind for _, kind, *_ in ANSWERS["changes"]} >= {"import", "alias", "delete", "restore", "purge", "removed"}
    assert {each["stored"] for each in ANSWERS["resolved"].values()} == {True, False}
    assert {tuple(each["kinds"]) for each in ANSWERS["resolved"].values()} == {("lora",), ("reft",), ("lora", "reft")}
    assert {each["positions"] for each in ANSWERS["resolved"].values()} == {"prefill", "all"}
    assert [each["name"] for each in ANSWERS["deleted"]] == ["gone"]
    assert len(ANSWERS["exported"]) == len(STORED) == 14


def test_lists_and_histories(library: AdapterLibrary) -> None:
    catalog = library.catalog
    check_same([adapter_as_json(each) for each in catalog.list()], ANSWERS["listed"])
    check_same([adapter_as_json(each) for each in catalog.list(deleted=True)], ANSWERS["deleted"])
    names = [(each["tenant"], each["name"].rpartition("/")[2]) for each in ANSWERS["listed"]]
    details = [catalog.show(tenant, name) for tenant, name in names]
    check_same([details_as_json(each) for each in details], ANSWERS["details"])
    histories = [
        [move_as_json(each.summary.full_name, move) for move in catalog.alias_history(tenant, name, alias)]
        for (tenant, name), each in zip(names, details, strict=True)
        for alias in each.aliases
    ]
    check_same(histories, ANSWERS["histories"])
    changes = [[each.sequence, each.kind, each.tenant, each.name] for each in catalog.changes_since(0)]
    assert changes == ANSWERS["changes"]


@pytest.mark.parametrize("reference", ANSWERS["resolved"])
def test_names_resolve(library: AdapterLibrary, reference: str) -> None:
    revision = library.catalog.resolve(reference)
    check_same(revision_as_json(revision, max_expert_rank=0), ANSWERS["resolved"][reference])
    assert revision.manifest.to_json() == ANSWERS["manifests"][revision.revision_id]
    by_digest = f"{revision.full_name}@{revision.revision_id}"
    assert library.catalog.resolve(by_digest) == revision


def test_the_store_is_sound(library: AdapterLibrary) -> None:
    assert list(library.catalog.referenced_revisions()) == ANSWERS["referenced"]
    report = library.fsck(0)
    assert report.is_sound
    assert report.num_referenced == report.num_objects == len(ANSWERS["referenced"])
    assert (report.unreferenced.count, report.left_over.count) == (0, 0)


@pytest.mark.parametrize("reference", STORED)
def test_exports_have_the_same_content(library: AdapterLibrary, tmp_path: Path, reference: str) -> None:
    exported = library.export(reference, tmp_path / "exported")
    assert exported.revision_id == ANSWERS["resolved"][reference]["revision"]
    again = read_adapter(tmp_path / "exported", library.base, library.limits)
    assert revision_id_of(again) == ANSWERS["exported"][reference]


def test_what_is_in_memory_only_is_not_exported(library: AdapterLibrary, tmp_path: Path) -> None:
    revision = library.catalog.resolve("acme/live@train")
    assert not revision.stored
    assert library.catalog.kept_in_memory([revision.revision_id]) == {revision.revision_id: True}
    with pytest.raises(RevisionNotStored):
        library.export("acme/live@train", tmp_path / "exported")


def test_aliases_move_and_roll_back(library: AdapterLibrary) -> None:
    """Past the moves, and the rollback, that 0.1.0 made: r1, r2, r3, back to r2."""
    catalog, before = library.catalog, library.catalog.last_change()
    assert catalog.rollback("default", "support", "prod").to_number == 1
    with pytest.raises(CatalogConflict, match="no revision before r1"):
        catalog.rollback("default", "support", "prod")
    assert catalog.set_alias("default", "support", "prod", 3, expected=1).to_number == 3
    assert catalog.rollback("default", "support", "prod").to_number == 1
    assert catalog.resolve("support@prod").number == 1
    assert catalog.resolve("support").number == 3
    assert catalog.last_change() == before + 3


def test_deleted_adapters_are_restored_or_collected(library: AdapterLibrary) -> None:
    catalog = library.catalog
    with pytest.raises(AdapterNotFound, match=r"'gone' was deleted on"):
        catalog.resolve("gone")
    with pytest.raises(AdapterNotFound, match=r"'purged' was deleted on .*; import it again"):
        catalog.restore("default", "purged")
    catalog.restore("default", "gone")
    revision = catalog.resolve("gone")
    assert library.store.verify(revision.revision_id).revision_id == revision.revision_id
    catalog.delete("default", "gone")
    assert library.collect_garbage(datetime.now(UTC) + timedelta(days=1)) == 1
    assert not library.store.exists(revision.revision_id)
    assert library.fsck(0).is_sound


def test_imports_go_on(library: AdapterLibrary, tmp_path: Path) -> None:
    """The same files are the revision that they were, and others are the next one.

    0.1.0 took a directory that says nothing of positions for one that was trained for the prompt.
    """
    shutil.copytree(DATA / "lora-2", said := tmp_path / "said")
    config = json.loads((said / "adapter_config.json").read_text())
    (said / "adapter_config.json").write_text(json.dumps({**config, "prelude": {"positions": "prefill"}}))
    again = library.import_directory("support", said)
    assert (again.number, again.revision_id) == (2, ANSWERS["resolved"]["support@r2"]["revision"])
    assert library.catalog.resolve("support").number == 2
    new = write_random_lora(tmp_path / "new", library.base, 100, modules=["v_proj"], rank=3)
    for name, number in (("support", 4), ("acme/live", 3), ("purged", 2), ("new", 1)):
        assert library.import_directory(name, new).number == number
        assert library.catalog.resolve(name).number == number
    assert library.fsck(0).is_sound
    assert library.export("support@r4", tmp_path / "exported").number == 4
