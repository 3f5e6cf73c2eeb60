"""The store, over a folder and over an S3 server on loopback. What is without `store` holds for one of them."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters.full_disk import files_of_at_most
from support.adapters.stored_objects import num_incoming, overwrite, raw, revision, source

from adapters.store import (
    Envelope,
    RevisionNotStored,
    S3Access,
    StoreConflict,
    StoreCorrupt,
    StoreFull,
    StoreUnavailable,
    open_store,
)
from adapters.store.envelope import ENVELOPE_BYTES, content_of
from adapters.store.layout import key_of, revision_of
from adapters.store.signing import Signer

SIGNER = Signer.generate()


def test_what_is_published_is_fetched(store, tmp_path):
    for number, size in enumerate([0, 1, 1000, 17_000_000]):  # the last has more than two chunks of 8 MiB
        content = os.urandom(size)
        envelope = store.publish(revision(number), source(tmp_path, content))
        assert envelope == Envelope(revision(number), hashlib.sha256(content).hexdigest(), size)
        assert store.verify(revision(number)) == envelope
        assert store.fetch(revision(number), tmp_path / "deep" / "folder" / str(number)) == envelope
        assert (tmp_path / "deep" / "folder" / str(number)).read_bytes() == content
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == ["0", "1", "2", "3"]
    listed = list(store.list())
    assert [each.revision_id for each in listed] == sorted(map(revision, range(4)))
    assert sum(each.num_bytes for each in listed) == 4 * ENVELOPE_BYTES + 17_001_001
    assert all(abs(each.modified_s - time.time()) < 60 for each in listed)
    assert all(store.find(each.revision_id) == each for each in listed)
    assert num_incoming(store) == 0


@pytest.mark.slow
def test_an_object_that_is_deleted_while_it_is_read(store, tmp_path):
    content = os.urandom(1000) * 40_000
    store.publish(revision(1), source(tmp_path, content))
    claimed, rest = store.begin_read(revision(1))
    assert claimed.content_bytes == len(content)
    first = next(rest)
    store.delete(revision(1))
    if store.url.startswith("file"):  # an open file stays readable
        assert b"".join([first, *(part for part in rest if not isinstance(part, Envelope))]) == content
    else:
        with pytest.raises(RevisionNotStored, match=revision(1)):
            list(rest)
    with pytest.raises(RevisionNotStored, match=revision(1)):
        store.begin_read(revision(1))


@pytest.mark.slow
def test_what_is_not_stored(store, tmp_path):
    assert not store.exists(revision(1))
    assert list(store.list()) == []
    for read in (store.verify, store.quarantine, lambda each: store.fetch(each, tmp_path / "fetched")):
        with pytest.raises(RevisionNotStored, match=revision(1)):
            read(revision(1))
    assert not (tmp_path / "fetched").exists()
    store.delete(revision(1))
    store.publish(revision(1), source(tmp_path, b"content"))
    assert store.exists(revision(1))
    store.delete(revision(1))
    assert not store.exists(revision(1))
    for wrong in ("", "sha256:12", revision(1).upper(), "../" + revision(1)):
        with pytest.raises(ValueError, match="is not a revision id"):
            store.exists(wrong)


def test_publishing_again_is_no_second_copy_and_counts_as_new(store, tmp_path):
    path = source(tmp_path, b"content")
    first = store.publish(revision(1), path)
    before = store.find(revision(1))
    time.sleep(1.1)  # S3 keeps whole seconds
    assert store.publish(revision(1), path) == first
    after = store.find(revision(1))
    assert after.modified_s > before.modified_s
    assert after.num_bytes == before.num_bytes
    assert len(list(store.list())) == 1
    assert num_incoming(store) == 0


def test_other_bytes_for_a_revision_are_refused(store, tmp_path):
    store.publish(revision(1), source(tmp_path, b"content"))
    with pytest.raises(StoreConflict, match=hashlib.sha256(b"other").hexdigest()):
        store.publish(revision(1), source(tmp_path, b"other"))
    store.fetch(revision(1), tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"content"


DAMAGES = {
    "half an envelope": lambda data: data[:40],
    "another revision": lambda data: data[:16] + bytes(32) + data[48:],
    "another digest": lambda data: data[:48] + bytes(32) + data[80:],
    "cut": lambda data: data[:-1],
    "a bit": lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
}


@pytest.mark.slow
def test_damage_is_found_and_a_publication_puts_it_right(store, tmp_path):
    fetched = tmp_path / "fetched"
    for number, (name, damage) in enumerate(DAMAGES.items()):
        content, key = os.urandom(1000), key_of(revision(number))
        store.publish(revision(number), source(tmp_path, content))
        overwrite(store, key, damage(raw(store, key)))
        fetched.write_bytes(b"before")
        with pytest.raises(StoreCorrupt, match=key) as caught:
            store.fetch(revision(number), fetched)
        assert (hashlib.sha256(content).hexdigest() in str(caught.value)) == (
            name in ("a bit", "cut", "another digest")
        )
        with pytest.raises(StoreCorrupt):
            store.verify(revision(number))
        assert fetched.read_bytes() == b"before"
        assert not list(tmp_path.glob(".fetched*"))
        store.publish(revision(number), source(tmp_path, content))
        store.fetch(revision(number), fetched)
        assert fetched.read_bytes() == content


@pytest.mark.slow
def test_storage_that_loses_bytes_publishes_nothing(store, tmp_path, monkeypatch):
    write = store._objects.write
    monkeypatch.setattr(store._objects, "write", lambda key, chunks: write(key, (chunk[:-1] for chunk in chunks)))
    with pytest.raises(StoreCorrupt, match="incoming/"):
        store.publish(revision(1), source(tmp_path, b"content"))
    assert not store.exists(revision(1))
    assert num_incoming(store) == 0


def test_a_failing_source_publishes_nothing(store, tmp_path, monkeypatch):
    def breaks_off(envelope, file):
        yield envelope.encode()
        yield b"some"
        raise OSError("the source is gone")

    monkeypatch.setattr("adapters.store.store._object_of", breaks_off)
    with pytest.raises(OSError, match="the source is gone"):
        store.publish(revision(1), source(tmp_path, b"some content"))
    assert not store.exists(revision(1))
    assert num_incoming(store) == 0
    with pytest.raises(FileNotFoundError):
        store.publish(revision(1), tmp_path / "absent")


def test_a_clean_up_that_deletes_what_is_being_published(store, tmp_path, monkeypatch):
    move = store._objects.move

    def move_what_was_deleted(temporary, key):
        store._objects.delete(temporary)
        move(temporary, key)

    monkeypatch.setattr(store._objects, "move", move_what_was_deleted)
    with pytest.raises(StoreUnavailable, match="was deleted while it was published"):
        store.publish(revision(1), source(tmp_path, b"content"))
    assert not store.exists(revision(1))


@pytest.mark.slow
def test_foreign_objects_are_not_listed(store, tmp_path):
    store.publish(revision(1), source(tmp_path, b"content"))
    digits = revision(2).removeprefix("sha256:")
    for key in ("revisions/readme", f"revisions/zz/{digits}", f"revisions/{digits[:2]}/{digits}.part"):
        overwrite(store, key, b"foreign")
        assert revision_of(key) is None
    assert [each.revision_id for each in store.list()] == [revision(1)]


def test_no_room_in_the_store(tmp_path):
    store = open_store(f"file://{tmp_path}/store")
    store.publish(revision(1), source(tmp_path, b"small"))
    large = source(tmp_path, os.urandom(3_000_000))
    with files_of_at_most(1_000_000), pytest.raises(StoreFull, match=f"{tmp_path}/store has no room for incoming/"):
        store.publish(revision(2), large)
    assert [each.revision_id for each in store.list()] == [revision(1)]
    assert num_incoming(store) == 0
    store.publish(revision(2), large)


def test_no_room_where_a_revision_is_fetched_to(store, tmp_path):
    store.publish(revision(1), source(tmp_path, os.urandom(3_000_000)))
    with files_of_at_most(1_000_000), pytest.raises(StoreFull, match=f"no room for an adapter at {tmp_path}/cache/one"):
        store.fetch(revision(1), tmp_path / "cache" / "one")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_store_that_is_not_there(tmp_path, s3):
    folder = open_store(f"file://{tmp_path}/store")
    (tmp_path / "store").rmdir()
    bucket = open_store("s3://no-such-bucket/prefix", s3)
    for store in (folder, bucket):
        for call in (
            lambda store=store: store.exists(revision(1)),
            lambda store=store: store.verify(revision(1)),
            lambda store=store: list(store.list()),
            lambda store=store: store.fetch(revision(1), tmp_path / "fetched"),
        ):
            with pytest.raises(StoreUnavailable, match="does not exist"):
                call()
    with pytest.raises(StoreUnavailable, match="does not exist"):
        bucket.publish(revision(1), source(tmp_path, b"content"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="failed at"):
        open_store(f"file://{tmp_path}/file/store")


def test_urls_that_are_no_store():
    for url in ("", "/folder", "file://", "s3://", "ftp://host/path", "memory://x"):
        with pytest.raises(ValueError, match="neither file:///folder nor s3://bucket/prefix"):
            open_store(url)


def test_secrets_are_not_shown():
    assert "hidden" not in repr(S3Access(secret_key="hidden"))


@settings(max_examples=80)
@given(
    content=st.binary(max_size=300),
    cuts=st.lists(st.integers(1, 200), max_size=8),
    is_signed=st.booleans(),
    data=st.data(),
)
def test_an_object_is_read_in_any_pieces_and_any_change_of_it_is_found(content, cuts, is_signed, data):
    envelope = Envelope(revision(1), hashlib.sha256(content).hexdigest(), len(content))
    envelope = SIGNER.signed(envelope) if is_signed else envelope
    checked = envelope.encode() + content
    assert len(checked + envelope.signature) == envelope.object_bytes

    def read(stored: bytes) -> list[bytes | Envelope]:
        def pieces() -> Iterator[bytes]:
            rest = stored
            for cut in cuts:
                yield rest[:cut]
                rest = rest[cut:]
            yield rest

        return list(content_of(filter(None, pieces()), "key", revision(1)))

    *parts, last = read(checked + envelope.signature)
    assert (b"".join(map(bytes, parts)), last) == (content, envelope)
    place = data.draw(st.integers(0, len(checked) - 1))
    flipped = checked[:place] + bytes([checked[place] ^ data.draw(st.integers(1, 255))]) + checked[place + 1 :]
    whole = checked + envelope.signature
    for changed in (flipped + envelope.signature, whole[:place], whole[:-1], whole + b"x"):
        with pytest.raises(StoreCorrupt):
            read(changed)


def test_a_read_that_is_not_finished_leaves_no_thread():
    content = bytes(10_000)
    envelope = Envelope(revision(1), hashlib.sha256(content).hexdigest(), len(content))
    parts = content_of([envelope.encode() + content[:5000], content[5000:]], "key", revision(1))
    assert next(parts) == content[:5000]
    assert [each for each in threading.enumerate() if each.name.startswith("digest")]  # a part is hashed meanwhile
    parts.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("digest")]
