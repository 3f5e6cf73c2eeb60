"""A catalog and a store that were written long before this release are read as they were, and can be changed.

data/stored_earlier has every kind of adapter, an adapter that was deleted and one whose bytes were collected.
"""

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.adapters.random_adapters import write_random_lora

from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterNotFound
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import RevisionNotStored, open_store

DATA = Path(__file__).parent / "data" / "stored_earlier"
ANSWERS = json.loads((DATA / "answers.json").read_text())  # by reference


@pytest.fixture
def library(tmp_path: Path) -> Iterator[AdapterLibrary]:
    """Over a copy: opening a catalog brings its tables up to date."""
    folder = shutil.copytree(DATA, tmp_path / "stored")
    catalog = SqlCatalog.open(f"sqlite:///{folder}/catalog.db")
    store, base = open_store(f"file://{folder}/store"), BaseModel.read(folder / "model")
    yield AdapterLibrary(catalog, store, base, Limits(), "bfloat16", "base")
    catalog.close()


def test_names_resolve_and_exports_have_the_same_content(library: AdapterLibrary, tmp_path: Path) -> None:
    assert len(library.catalog.list()) == 5
    for number, (reference, expected) in enumerate(ANSWERS.items()):
        revision = library.catalog.resolve(reference)
        found = {"revision": revision.revision_id, "positions": str(revision.manifest.positions)}
        assert found.items() <= expected.items()
        folder = tmp_path / str(number)
        if expected["exported"] is None:  # it is in workers' memory only
            assert not revision.stored
            with pytest.raises(RevisionNotStored):
                library.export(reference, folder)
        else:
            assert library.export(reference, folder).revision_id == expected["revision"]
            again = revision_id_of(read_adapter(folder, library.base, library.limits))
            assert again == expected["exported"]  # in the serving precision


def test_the_store_is_sound(library: AdapterLibrary) -> None:
    report = library.fsck(0)
    assert report.is_sound
    assert report.num_referenced == report.num_objects == 8
    assert (report.unreferenced.count, report.left_over.count) == (0, 0)


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
    """The same files are the revision that they were, and others are the next one."""
    shutil.copytree(DATA / "lora-2", said := tmp_path / "said")
    config = json.loads((said / "adapter_config.json").read_text())
    (said / "adapter_config.json").write_text(json.dumps({**config, "prelude": {"positions": "prefill"}}))
    again = library.import_directory("support", said)
    assert (again.number, again.revision_id) == (2, ANSWERS["support@r2"]["revision"])
    new = write_random_lora(tmp_path / "new", library.base, 100, modules=["v_proj"], rank=3)
    for name, number in (("support", 4), ("acme/live", 3), ("purged", 2), ("new", 1)):
        assert library.import_directory(name, new).number == number
        assert library.catalog.resolve(name).number == number
    assert library.fsck(0).is_sound
