"""Catalog and store as one: imports, exports, garbage collection, fsck."""

from __future__ import annotations

import errno
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from support.stored_objects import num_incoming, overwrite

from adapters import library as library_module
from adapters.catalog.sql import SqlCatalog
from adapters.errors import (
    AdapterIncompatible,
    AdapterMalformed,
    AdapterNotFound,
    CatalogConflict,
    CatalogUnavailable,
    InvalidReference,
    RevisionBeingRemoved,
)
from adapters.formats import read_adapter
from adapters.library import AdapterLibrary
from adapters.model.manifest import Manifest, revision_id_of
from adapters.packed import read_packed
from adapters.store import AdapterStore, RevisionNotStored, StoreConflict, StoreFull, open_store
from adapters.store.layout import key_of
from samples.random_adapters import write_random_lora

TOMORROW = datetime.now(UTC) + timedelta(days=1)


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


def stored(store: AdapterStore) -> list[str]:
    return [each.revision_id for each in store.list()]


def test_an_import_is_in_the_catalog_and_in_the_store(library, lora, base, limits, tmp_path):
    directory = lora(1)
    steps: list[str] = []
    added = library.import_directory("acme/bot", directory, by="eve", on_step=steps.append)
    adapter = read_adapter(directory, base, limits)
    assert (added.full_name, added.number, added.revision_id) == ("acme/bot", 1, revision_id_of(adapter))
    assert added.manifest == Manifest.of(adapter)
    assert library.catalog.resolve("acme/bot") == added
    assert library.catalog.alias_history("acme", "bot")[0].moved_by == "eve"
    assert steps == ["reading", "packing", "storing", "committing"]
    library.store.fetch(added.revision_id, tmp_path / "fetched")
    packed = read_packed(tmp_path / "fetched")
    packed.check_fits(base)
    assert (packed.metadata.revision_id, packed.metadata.dtype) == (added.revision_id, "bfloat16")
    assert added.bytes == (tmp_path / "fetched").stat().st_size
    assert library.fsck(0).is_sound


def test_the_same_content_again_is_the_same_revision(library, lora):
    first = library.import_directory("bot", lora(1))
    second = library.import_directory("bot", lora(2))
    assert library.import_directory("bot", lora(1)) == first
    assert (first.number, second.number) == (1, 2)
    assert library.catalog.resolve("bot") == first
    assert library.catalog.resolve("bot@r2") == second
    assert len(stored(library.store)) == 2


def test_content_of_two_adapters_is_stored_once_and_until_both_are_gone(library, lora):
    shared = library.import_directory("bot", lora(1)).revision_id
    other = library.import_directory("acme/bot", lora(1))
    assert (other.revision_id, other.number) == (shared, 1)
    assert stored(library.store) == [shared]
    library.catalog.delete("default", "bot")
    assert library.collect_garbage(TOMORROW) == 0
    assert library.store.verify(shared)
    library.catalog.delete("acme", "bot")
    assert library.collect_garbage(TOMORROW) == 1
    assert stored(library.store) == []


def test_a_push_leaves_latest_where_it_is(library, lora):
    first = library.import_directory("bot", lora(1), moves_latest=False)
    assert library.catalog.resolve("bot") == first  # a new adapter has a latest revision
    second = library.import_directory("bot", lora(2), moves_latest=False)
    assert library.catalog.resolve("bot") == first
    library.import_directory("bot", lora(2), moves_latest=False)
    assert library.catalog.resolve("bot") == first
    library.catalog.set_alias("default", "bot", "latest", second.number)
    assert library.catalog.resolve("bot") == second


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


def test_what_was_in_memory_only_can_be_stored_later(library, lora, tmp_path):
    packed = library.pack("bot", lora(1), tmp_path / "packed")
    revision = library.add_in_memory("bot", packed, "latest")
    assert stored(library.store) == []
    again = library.import_directory("bot", lora(1))
    assert again == replace(revision, stored=True)
    assert stored(library.store) == [revision.revision_id]
    assert library.export("bot", tmp_path / "out") == again
    assert library.fsck(0).num_referenced == 1
    library.catalog.delete("default", "bot")
    assert library.collect_garbage(TOMORROW) == 1
    assert stored(library.store) == []


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


def test_fsck_takes_no_bytes_from_under_an_import_of_what_was_in_memory_only(library, lora, monkeypatch, tmp_path):
    packed = library.pack("bot", lora(1), tmp_path / "packed")
    revision = library.add_in_memory("bot", packed, "latest")
    add_revision = library.catalog.add_revision
    repaired: list[int] = []

    def after_a_repair(*arguments, **options):
        if not repaired:
            repaired.append(library.fsck(0, repair=True).num_repaired)
        return add_revision(*arguments, **options)

    monkeypatch.setattr(
        SqlCatalog, "add_revision", lambda _, *arguments, **options: after_a_repair(*arguments, **options)
    )
    assert library.import_directory("bot", lora(1)).stored
    assert repaired == [1]
    assert library.store.verify(revision.revision_id)


def test_the_base_models_name_is_taken(library, lora):
    library = replace(library, base_name="demo")
    for name in ("demo", "default/demo"):
        with pytest.raises(InvalidReference, match="the base model's name"):
            library.import_directory(name, lora(1))
        with pytest.raises(InvalidReference, match="the base model's name"):
            library.add(name, read_adapter(lora(1), library.base, library.limits))
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


def test_a_deleted_adapter_takes_no_new_revision(library, lora):
    library.import_directory("bot", lora(1))
    library.catalog.delete("default", "bot")
    with pytest.raises(CatalogConflict, match="restore it first"):
        library.import_directory("bot", lora(2))
    assert library.fsck(0, repair=True).unreferenced.count == 1
    library.catalog.restore("default", "bot")
    assert library.import_directory("bot", lora(2)).number == 2


def test_a_full_disk_says_so(library, lora, monkeypatch, tmp_path):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    library.import_directory("bot", lora(1))
    monkeypatch.setattr(library_module, "write_packed", no_room)
    with pytest.raises(StoreFull, match="free or add disk space"):
        library.import_directory("bot", lora(2))
    monkeypatch.setattr(library_module, "export_packed", no_room)
    with pytest.raises(StoreFull, match=str(tmp_path / "out")):
        library.export("bot", tmp_path / "out")
    assert len(stored(library.store)) == 1


def test_bytes_that_are_being_removed_are_stored_again(library, lora, monkeypatch):
    """A collection takes the bytes out between the importer's store and its row."""
    library.import_directory("old", lora(1))
    library.catalog.delete("default", "old")
    publish, collected = AdapterStore.publish, []

    def publish_and_lose(store, revision_id, source):
        envelope = publish(store, revision_id, source)
        if not collected:
            collected.append(library.collect_garbage(TOMORROW))
            assert not store.exists(revision_id)
        return envelope

    monkeypatch.setattr(AdapterStore, "publish", publish_and_lose)
    added = library.import_directory("new", lora(1))
    assert collected == [1]
    assert library.store.verify(added.revision_id)
    assert library.fsck(0).is_sound


@pytest.mark.slow
def test_content_is_not_accepted_until_its_bytes_are_gone(library, lora, monkeypatch):
    """An import while the bytes that it has just found in the store are being removed."""
    library.import_directory("old", lora(1))
    library.catalog.delete("default", "old")
    delete, imported = AdapterStore.delete, []

    def import_and_delete(store, revision_id):
        with pytest.raises(RevisionBeingRemoved):
            library.import_directory("new", lora(1))
        imported.append(revision_id)
        delete(store, revision_id)

    with monkeypatch.context() as patched:
        patched.setattr(AdapterStore, "delete", import_and_delete)
        assert library.collect_garbage(TOMORROW) == 1
    assert len(imported) == 1
    library.import_directory("new", lora(1))
    assert library.fsck(0).is_sound


@pytest.mark.slow
def test_an_import_that_never_gets_its_bytes_in_gives_up(library, lora):
    library.import_directory("old", lora(1))
    library.catalog.delete("default", "old")
    with library.catalog.collecting():
        (removed,) = library.catalog.collect_garbage(TOMORROW)
        with pytest.raises(RevisionBeingRemoved, match="repeat the import"):
            library.import_directory("new", lora(1))
        library.store.delete(removed)
        library.catalog.confirm_removed([removed])
    assert library.store.verify(library.import_directory("new", lora(1)).revision_id)


def test_an_import_finishes_a_collection_that_was_killed(library, lora):
    for seed in (1, 2):
        library.import_directory("old", lora(seed))
    library.catalog.delete("default", "old")
    with library.catalog.collecting():
        assert len(library.catalog.collect_garbage(TOMORROW)) == 2
    assert len(stored(library.store)) == 2
    added = library.import_directory("new", lora(1))
    assert stored(library.store) == [added.revision_id]
    assert library.collect_garbage(TOMORROW) == 0


def test_a_collection_that_broke_off_is_finished_by_the_next(library, lora, monkeypatch):
    monkeypatch.setattr(library_module, "_CONFIRMED_AT_A_TIME", 1)
    for seed in range(3):
        library.import_directory("old", lora(seed))
    library.catalog.delete("default", "old")
    removed: list[str] = []
    delete = AdapterStore.delete

    def delete_two(store, revision_id):
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(revision_id)
        delete(store, revision_id)

    with monkeypatch.context() as patched:
        patched.setattr(AdapterStore, "delete", delete_two)
        with pytest.raises(KeyboardInterrupt):
            library.collect_garbage(TOMORROW)
    assert len(stored(library.store)) == 1
    assert library.collect_garbage(TOMORROW) == 1
    assert stored(library.store) == []
    assert library.collect_garbage(TOMORROW) == 0


def test_one_collection_at_a_time(library, lora, database, monkeypatch):
    library.import_directory("old", lora(1))
    library.catalog.delete("default", "old")
    other = type(library.catalog)(database.url)
    with other.collecting():
        with pytest.raises(CatalogConflict, match="another garbage collection"):
            library.collect_garbage(TOMORROW)
        assert len(stored(library.store)) == 1
    with pytest.raises(RuntimeError), other.collecting():  # it ends however it ends
        raise RuntimeError
    assert library.collect_garbage(TOMORROW) == 1
    other.close()


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgres"], indirect=True)  # a file's lock is lost with its process only
def test_a_collection_that_has_lost_its_right_goes_no_further(library, lora, database, monkeypatch):
    for seed in (1, 2):
        library.import_directory("old", lora(seed))
    library.catalog.delete("default", "old")
    delete = AdapterStore.delete

    def delete_and_lose(store, revision_id):
        delete(store, revision_id)
        database.cut_connections()

    with monkeypatch.context() as patched:
        patched.setattr(AdapterStore, "delete", delete_and_lose)
        with pytest.raises(CatalogUnavailable):
            library.collect_garbage(TOMORROW)
    assert len(stored(library.store)) == 1  # only what it had removed before
    assert library.collect_garbage(TOMORROW) == 2


@pytest.mark.slow
def test_collectors_and_importers_of_the_same_content_at_once(library, lora, database):
    """Whoever has been told that an adapter is there finds its bytes, however often they were collected."""
    num_rounds = 8
    directories = [lora(seed) for seed in range(2)]
    done = threading.Event()
    refused: list[str] = []
    collected: list[int] = []

    def collect() -> None:
        while not done.is_set():
            try:
                collected.append(library.collect_garbage(TOMORROW))
            except CatalogConflict as error:
                refused.append(str(error))

    def import_and_delete(number: int) -> None:
        for step in range(num_rounds):
            name = f"a{number}-{step}"
            try:
                added = library.import_directory(name, directories[step % 2])
            except RevisionBeingRemoved:  # five times in a row: collectors do nothing else here
                continue
            assert library.store.verify(added.revision_id)
            library.catalog.delete("default", name)

    collectors = [threading.Thread(target=collect) for _ in range(3)]
    for thread in collectors:
        thread.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(import_and_delete, range(4)))
    finally:
        done.set()
        for thread in collectors:
            thread.join()
    print("collected", sum(collected), "refused", len(refused))
    assert sum(collected) > 0
    assert library.fsck(0).is_sound


def test_fsck_repairs_and_an_import_heals(library, lora):
    damaged = library.import_directory("bot", lora(1)).revision_id
    lost = library.import_directory("bot", lora(2)).revision_id
    overwrite(library.store, key_of(damaged), b"x" * 1000)
    library.store.delete(lost)
    report = library.fsck(0, repair=True)
    assert not report.is_sound
    assert (report.corrupt.listed, report.missing.listed, report.num_repaired) == ([damaged], [lost], 1)
    for seed in (1, 2):
        library.import_directory("bot", lora(seed))
    assert library.fsck(0).is_sound
    assert library.catalog.show("default", "bot").num_revisions == 2


def test_fsck_takes_no_bytes_from_under_an_import(library, lora, monkeypatch):
    """The import makes old bytes young after the repair has looked, and writes its row before or after they go."""
    revision_id = library.import_directory("old", lora(1)).revision_id
    library.catalog.delete("default", "old")
    with library.catalog.collecting():
        assert library.catalog.collect_garbage(TOMORROW) == [revision_id]
        library.catalog.confirm_removed([revision_id])  # as if the bytes were another's who has left them
    delete, imported = AdapterStore.delete, []
    add_revision = type(library.catalog).add_revision
    is_at_row, may_write_row = threading.Event(), threading.Event()

    def add_later(*arguments, **options):
        is_at_row.set()
        assert may_write_row.wait(10)
        return add_revision(*arguments, **options)

    def delete_after_the_row(store, revision_id):
        delete(store, revision_id)
        may_write_row.set()

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr(type(library.catalog), "add_revision", add_later)
        patched.setattr(AdapterStore, "delete", delete_after_the_row)
        importing = pool.submit(library.import_directory, "new", lora(1))
        assert is_at_row.wait(10)
        assert library.fsck(0, repair=True).num_repaired == 1
        imported.append(importing.result(30))
    assert imported[0].revision_id == revision_id
    assert library.fsck(0).is_sound
    assert library.store.verify(revision_id)


def test_fsck_leaves_what_has_got_a_row_since(library, lora, monkeypatch):
    revision_id = library.import_directory("old", lora(1)).revision_id
    library.catalog.delete("default", "old")
    with library.catalog.collecting():
        library.catalog.confirm_removed(library.catalog.collect_garbage(TOMORROW))
    find, finds = AdapterStore.find, []

    def find_and_import(store, revision_id):
        found = find(store, revision_id)
        if not finds:
            finds.append(found)
            library.import_directory("new", lora(1))
        return found

    monkeypatch.setattr(AdapterStore, "find", find_and_import)
    assert library.fsck(0, repair=True).num_repaired == 0
    assert finds
    assert library.catalog.resolve("new").revision_id == revision_id
    assert library.fsck(0).is_sound


def test_fsck_does_not_remove_while_somebody_collects(library, lora, database):
    library.import_directory("old", lora(1))
    library.catalog.delete("default", "old")
    with library.catalog.collecting():
        library.catalog.confirm_removed(library.catalog.collect_garbage(TOMORROW))
    other = type(library.catalog)(database.url)
    with other.collecting():
        report = library.fsck(0, repair=True)
    other.close()
    assert (report.unreferenced.count, report.num_repaired, len(stored(library.store))) == (1, 0, 1)
    assert library.fsck(0, repair=True).num_repaired == 1
    assert stored(library.store) == []
    assert library.import_directory("new", lora(1)).number == 1
    assert library.fsck(0).is_sound


def test_fsck_spares_what_is_young(library, lora, base, limits, tmp_path):
    directory = lora(1)
    adapter = read_adapter(directory, base, limits)
    (tmp_path / "bytes").write_bytes(b"some")
    library.store.publish(revision_id_of(adapter), tmp_path / "bytes")
    report = library.fsck(3600, repair=True)
    assert (report.num_young, report.num_repaired, len(stored(library.store))) == (1, 0, 1)
    report = library.fsck(0, repair=True, check_content=False)
    assert (report.unreferenced.count, report.num_repaired, stored(library.store)) == (1, 1, [])
