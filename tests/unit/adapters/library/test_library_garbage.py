"""Garbage collection and fsck of a library, beside imports of the same content."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.adapters.catalog_databases import TOMORROW
from support.adapters.stored_objects import overwrite, stored
from support.held_calls import Held

from adapters import library as library_module
from adapters.catalog.sql import SqlCatalog
from adapters.errors import CatalogConflict, CatalogUnavailable, RevisionBeingRemoved
from adapters.store import AdapterStore
from adapters.store.layout import key_of


def deleted(library, lora, *seeds: int) -> list[str]:
    """Revisions of a deleted adapter, whose bytes are to be collected."""
    revision_ids = [library.import_directory("old", lora(seed)).revision_id for seed in seeds]
    library.catalog.delete("default", "old")
    return revision_ids


def left_behind(library, lora) -> str:
    """A revision whose bytes are in the store as if another had left them there."""
    [revision_id] = deleted(library, lora, 1)
    with library.catalog.collecting():
        library.catalog.confirm_removed(library.catalog.collect_garbage(TOMORROW))
    return revision_id


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


def test_bytes_that_are_being_removed_are_stored_again(library, lora, monkeypatch):
    """A collection takes the bytes out between the importer's store and its row."""
    deleted(library, lora, 1)
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
def test_an_import_that_never_gets_its_bytes_in_gives_up(library, lora):
    deleted(library, lora, 1)
    with library.catalog.collecting():
        (removed,) = library.catalog.collect_garbage(TOMORROW)
        with pytest.raises(RevisionBeingRemoved, match="repeat the import"):
            library.import_directory("new", lora(1))
        library.store.delete(removed)
        library.catalog.confirm_removed([removed])
    assert library.store.verify(library.import_directory("new", lora(1)).revision_id)


def test_an_import_finishes_a_collection_that_was_killed(library, lora):
    deleted(library, lora, 1, 2)
    with library.catalog.collecting():
        assert len(library.catalog.collect_garbage(TOMORROW)) == 2
    assert len(stored(library.store)) == 2
    added = library.import_directory("new", lora(1))
    assert stored(library.store) == [added.revision_id]
    assert library.collect_garbage(TOMORROW) == 0


def test_a_collection_that_broke_off_is_finished_by_the_next(library, lora, monkeypatch):
    monkeypatch.setattr(library_module, "_CONFIRMED_AT_A_TIME", 1)
    deleted(library, lora, 0, 1, 2)
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
    deleted(library, lora, 1)
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
    deleted(library, lora, 1, 2)
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
    revision_id = left_behind(library, lora)
    delete, imported = AdapterStore.delete, []

    def delete_after_the_row(store, revision_id):
        delete(store, revision_id)
        at_row.go_on.set()

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        at_row = Held(patched, type(library.catalog), "add_revision")
        patched.setattr(AdapterStore, "delete", delete_after_the_row)
        # The import may be writing its bytes again when the repair looks for unfinished ones.
        patched.setattr(AdapterStore, "incoming_older_than", lambda _store, _age_s: iter(()))
        importing = pool.submit(library.import_directory, "new", lora(1))
        assert at_row.begun.wait(120)
        assert library.fsck(0, repair=True).num_repaired == 1
        imported.append(importing.result(30))
    assert imported[0].revision_id == revision_id
    assert library.fsck(0).is_sound
    assert library.store.verify(revision_id)


def test_fsck_leaves_what_has_got_a_row_since(library, lora, monkeypatch):
    revision_id = left_behind(library, lora)
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
    left_behind(library, lora)
    other = type(library.catalog)(database.url)
    with other.collecting():
        report = library.fsck(0, repair=True)
    other.close()
    assert (report.unreferenced.count, report.num_repaired, len(stored(library.store))) == (1, 0, 1)
    assert library.fsck(0, repair=True).num_repaired == 1
    assert stored(library.store) == []
    assert library.import_directory("new", lora(1)).number == 1
    assert library.fsck(0).is_sound
