import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.adapters.stored_objects import overwrite, raw, revision, source

from adapters.store import AdapterStore, open_store
from adapters.store import fsck as module
from adapters.store.fsck import FsckReport
from adapters.store.layout import key_of


@pytest.fixture
def in_folder(tmp_path) -> AdapterStore:
    return filled(open_store(f"file://{tmp_path}/store"), tmp_path)


@pytest.fixture
def store(store, tmp_path) -> AdapterStore:
    return filled(store, tmp_path)


def filled(store: AdapterStore, folder: Path) -> AdapterStore:
    """With revisions 0 to 9, of which 8 is damaged, and something left over."""
    for number in range(10):
        store.publish(revision(number), source(folder, os.urandom(100 + number)))
    sound = raw(store, key_of(revision(8)))
    overwrite(store, key_of(revision(8)), sound[:-1] + bytes([sound[-1] ^ 1]))
    overwrite(store, "incoming/abandoned", b"half")
    return store


def ids(*numbers: int) -> list[str]:
    return sorted(map(revision, numbers))


def fsck(store: AdapterStore, referenced: Iterable[str], **options: Any) -> FsckReport:
    """One whose unreferenced revisions nobody else wants."""

    def remove(revision_id: str) -> bool:
        store.delete(revision_id)
        return True

    return module.fsck(store, referenced, options.pop("min_age_s", 0), remove, **options)


REFERENCED = ids(0, 1, 2, 3, 8, 77)  # 77 was never stored, 4 to 7 and 9 are not referenced


@pytest.mark.slow
def test_everything_is_found_and_nothing_touched(store):
    report = fsck(store, REFERENCED)
    assert (report.num_referenced, report.num_objects, report.num_young) == (6, 10, 0)
    assert report.num_bytes == sum(each.num_bytes for each in store.list())
    assert report.missing.listed == ids(77)
    assert report.corrupt.listed == ids(8)
    assert report.unreferenced.listed == ids(4, 5, 6, 7, 9)
    assert report.left_over.listed == ["incoming/abandoned"]
    assert report.num_repaired == 0
    assert not report.is_sound
    assert len(list(store.list())) == 10


def test_what_is_young_is_left_alone(store):
    report = fsck(store, REFERENCED, min_age_s=3600, repair=True)
    assert (report.num_young, report.unreferenced.count, report.left_over.count) == (5, 0, 0)
    assert len(list(store.list())) == 9  # without the damaged one
    assert len(list(store.incoming_older_than(0))) == 1


@pytest.mark.slow
def test_repair(store):
    damaged = raw(store, key_of(revision(8)))
    before = fsck(store, REFERENCED, repair=True)
    assert before.num_repaired == 1 + 5 + 1
    assert [each.revision_id for each in store.list()] == ids(0, 1, 2, 3)
    (quarantined,) = store._objects.list_folder("quarantine")
    assert quarantined.key.startswith("quarantine/" + revision(8).removeprefix("sha256:"))
    assert raw(store, quarantined.key) == damaged
    after = fsck(store, REFERENCED, repair=True)
    assert after.missing.listed == ids(8, 77)
    assert (after.corrupt.count, after.unreferenced.count, after.left_over.count, after.num_repaired) == (0, 0, 0, 0)
    assert fsck(store, ids(0, 1, 2, 3)).is_sound


def test_without_reading_the_content(in_folder, monkeypatch):
    monkeypatch.setattr(in_folder, "verify", None)
    report = fsck(in_folder, REFERENCED, check_content=False)
    assert (report.missing.listed, report.corrupt.count, report.unreferenced.count) == (ids(77), 0, 5)


def test_what_is_published_meanwhile_is_not_missing(in_folder, tmp_path):
    first = ids(*range(10))[0]
    new = [number for number in range(100, 120) if revision(number) > first]

    def referenced():
        yield first
        for number in new:  # by now the store is being listed
            in_folder.publish(revision(number), source(tmp_path, b"content"))
        yield from ids(*range(10), *new)[1:]

    assert fsck(in_folder, referenced(), check_content=False).is_sound


def test_what_changes_between_the_check_and_the_repair_is_kept(in_folder, tmp_path, monkeypatch):
    find = in_folder.find
    republished = source(tmp_path, b"sound again")

    def find_after_an_import(revision_id):
        if revision_id in ids(7, 8):
            in_folder.delete(revision_id)
            monkeypatch.setattr(in_folder, "find", find)
            in_folder.publish(revision_id, republished)
            monkeypatch.setattr(in_folder, "find", find_after_an_import)
        return find(revision_id)

    monkeypatch.setattr(in_folder, "find", find_after_an_import)
    fsck(in_folder, REFERENCED, repair=True)
    assert [each.revision_id for each in in_folder.list()] == ids(0, 1, 2, 3, 7, 8)
    assert in_folder.verify(revision(8)).content_bytes == len(b"sound again")


def test_what_is_replaced_while_it_goes_to_quarantine_comes_back(in_folder, tmp_path, monkeypatch):
    move, sound = in_folder._objects.move, source(tmp_path, b"sound again")

    def move_after_an_import(key, target):
        if target.startswith("quarantine/"):
            monkeypatch.setattr(in_folder._objects, "move", move)
            in_folder.publish(revision(8), sound)
        move(key, target)

    monkeypatch.setattr(in_folder._objects, "move", move_after_an_import)
    report = fsck(in_folder, ids(*range(10)), repair=True)
    assert (report.corrupt.listed, report.num_repaired) == (ids(8), 1)  # the left-over one
    assert in_folder.verify(revision(8)).content_bytes == len(b"sound again")
    assert in_folder._objects.list_folder("quarantine") == []


def test_findings_are_all_counted_but_not_all_listed(in_folder, monkeypatch):
    monkeypatch.setattr(module, "MAX_LISTED", 2)
    report = fsck(in_folder, [], check_content=False, repair=True)
    assert (report.unreferenced.count, report.unreferenced.listed) == (10, ids(*range(10))[:2])
    assert list(in_folder.list()) == []
