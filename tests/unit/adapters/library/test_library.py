"""Catalog and store as one: imports, exports, garbage collection, fsck."""

import errno
import hashlib
from dataclasses import replace

import pytest
from support.adapters.random_adapters import write_random_lora
from support.adapters.stored_objects import num_incoming, stored
from support.held_calls import failing

from adapters import library as library_module
from adapters.catalog.sql.tenants import CatalogQuota
from adapters.errors import (
    AdapterIncompatible,
    AdapterMalformed,
    AdapterNotFound,
    InvalidReference,
    TenantFull,
)
from adapters.formats import read_adapter
from adapters.library import AdapterLibrary
from adapters.model.manifest import Manifest, revision_id_of
from adapters.packed import packing, read_packed
from adapters.store import RevisionNotStored, StoreConflict, StoreFull


def test_an_import_is_in_the_catalog_and_in_the_store(library, lora, base, limits, tmp_path):
    directory = lora(1)
    added = library.import_directory("acme/bot", directory, by="eve")
    adapter = read_adapter(directory, base, limits)
    assert (added.full_name, added.number, added.revision_id) == ("acme/bot", 1, revision_id_of(adapter))
    assert added.manifest == Manifest.of(adapter)
    assert library.catalog.resolve("acme/bot") == added
    assert library.catalog.alias_history("acme", "bot")[0].moved_by == "eve"
    library.store.fetch(added.revision_id, tmp_path / "fetched")
    packed = read_packed(tmp_path / "fetched")
    packed.check_fits(base)
    assert (packed.metadata.revision_id, packed.metadata.dtype) == (added.revision_id, "bfloat16")
    assert added.bytes == (tmp_path / "fetched").stat().st_size
    assert library.fsck(0).is_sound


def test_a_push_points_its_alias_in_the_same_commit_and_leaves_latest(library, lora, monkeypatch):
    monkeypatch.delattr(type(library.catalog), "set_alias")  # it would be a second commit
    first = library.import_directory("acme/bot", lora(1), alias="stable", moves_latest=False)
    # A new adapter has a latest revision.
    assert library.catalog.resolve("acme/bot@stable") == library.catalog.resolve("acme/bot") == first
    second = library.import_directory("acme/bot", lora(2), alias="stable", moves_latest=False)
    assert library.catalog.resolve("acme/bot@stable") == second
    assert library.catalog.resolve("acme/bot") == first
    again = library.import_directory("acme/bot", lora(1), alias="stable", moves_latest=False)  # known content
    assert library.catalog.resolve("acme/bot@stable") == again == first


def test_a_revision_in_memory_only_is_in_the_catalog_alone(library, lora, base, tmp_path):
    first = library.import_directory("bot", lora(1))
    last = library.catalog.last_change()
    packed = library.pack("bot", lora(2), tmp_path / "shared" / "packed")
    assert library.catalog.last_change() == last
    read = read_packed(packed.path)
    read.check_fits(base)
    read.check_digest()
    assert read.metadata.revision_id == packed.revision_id
    assert packed.envelope.content_sha256 == hashlib.sha256(packed.path.read_bytes()).hexdigest()
    second = library.add_in_memory("bot", packed, "latest", by="eve")
    assert (second.number, second.stored, second.bytes) == (2, False, packed.path.stat().st_size)
    assert library.catalog.resolve("bot") == second
    assert library.catalog.alias_history("default", "bot")[0].moved_by == "eve"
    assert stored(library.store) == [first.revision_id]
    report = library.fsck(0)
    assert report.is_sound
    assert (report.num_referenced, report.missing.count) == (1, 0)
    with pytest.raises(RevisionNotStored, match=r"bot@r2 is kept in workers' memory only.*import the same files"):
        library.export("bot", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert library.add_in_memory("bot", library.pack("bot", lora(1), tmp_path / "again"), "latest") == first


def test_an_import_that_is_killed_before_it_says_that_it_has_stored_the_bytes(library, lora, tmp_path):
    """What it has left is nobody's, and the next import of the same content is not the worse for it."""
    packed = library.pack("bot", lora(1), tmp_path / "packed")
    revision = library.add_in_memory("bot", packed, "latest")
    library.store.publish(revision.revision_id, packed.path)
    report = library.fsck(0, repair=True)
    assert (report.is_sound, report.unreferenced.listed) == (True, [revision.revision_id])
    assert stored(library.store) == []
    assert library.import_directory("bot", lora(1)).stored
    assert library.store.verify(revision.revision_id)
    assert library.fsck(0, repair=True).unreferenced.count == 0
    assert library.store.verify(revision.revision_id)


def test_the_base_models_name_is_taken(library, lora):
    library = replace(library, base_name="demo")
    for name in ("demo", "default/demo"):
        with pytest.raises(InvalidReference, match="the base model's name"):
            library.import_directory(name, lora(1))
    assert stored(library.store) == []
    assert library.import_directory("acme/demo", lora(1)).number == 1


def test_what_is_refused_leaves_nothing(library, lora, base, tmp_path):
    (tmp_path / "empty").mkdir()
    huge = lora(2, std=1e38, alpha=64)  # only its scale makes it too large
    for name, directory, error in (
        ("bot", tmp_path / "empty", AdapterMalformed),
        ("a b", lora(1), InvalidReference),
        ("bot@prod", lora(1), InvalidReference),
        ("bot", write_random_lora(tmp_path / "rank", base, 1, rank=17), AdapterIncompatible),
        ("bot", huge, AdapterIncompatible),
    ):
        with pytest.raises(error):
            library.import_directory(name, directory)
    assert library.catalog.list() == []
    assert library.catalog.last_change() == 0
    assert stored(library.store) == []
    assert num_incoming(library.store) == 0


def test_a_revision_in_another_dtype_is_a_conflict(library, lora, catalog, base, limits):
    library.import_directory("bot", lora(1))
    other = AdapterLibrary(catalog, library.store, base, limits, "float32")
    with pytest.raises(StoreConflict, match="stored in one dtype"):
        other.import_directory("other", lora(1))
    with pytest.raises(AdapterNotFound):
        catalog.resolve("other")


def test_a_full_disk_says_so(library, lora, monkeypatch, tmp_path):
    no_room = OSError(errno.ENOSPC, "No space left on device")
    library.import_directory("bot", lora(1))
    failing(monkeypatch, packing, "write_packed", no_room)
    with pytest.raises(StoreFull, match="free or add disk space"):
        library.import_directory("bot", lora(2))
    failing(monkeypatch, library_module, "export_packed", no_room)
    with pytest.raises(StoreFull, match=str(tmp_path / "out")):
        library.export("bot", tmp_path / "out")
    assert len(stored(library.store)) == 1


def test_a_full_tenant_is_refused_before_a_byte_is_written(library, lora, monkeypatch):
    first = library.import_directory("acme/bot", lora(1))
    quota = CatalogQuota(bytes=2 * first.bytes - 1)
    with monkeypatch.context() as patched:
        patched.setattr(packing, "write_packed", lambda *_: pytest.fail("it is written"))
        with pytest.raises(TenantFull, match=f"it has {first.bytes}, and this adapter takes {first.bytes} more"):
            library.import_directory("acme/bot", lora(2), quota=quota)
    assert library.import_directory("acme/again", lora(1), quota=quota).revision_id == first.revision_id  # it has it
    assert library.import_directory("other/bot", lora(2), quota=quota).number == 1
