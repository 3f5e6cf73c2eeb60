"""The store, over a folder and over an S3 server on loopback. What is without `store` holds for one of them."""

import hashlib
import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.s3_server import BUCKET, s3_double
from support.stored_objects import num_incoming, overwrite, raw, revision, source

from adapters.errors import AdapterError
from adapters.store import (
    AdapterStore,
    Envelope,
    RevisionNotStored,
    S3Access,
    StoreConflict,
    StoreCorrupt,
    StoreFull,
    StoreUnavailable,
    errors,
    open_store,
)
from adapters.store.envelope import ENVELOPE_BYTES, content_of
from adapters.store.layout import key_of, revision_of

S3_PART = 4 * 1024**2  # but for the first, which is twice as long


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Access]:
    with s3_double() as access:
        yield access


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> AdapterStore:
    """An empty store."""
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/store")
    return open_store(f"s3://{BUCKET}/{tmp_path.name}", request.getfixturevalue("s3"))


def test_what_is_published_is_fetched(store, tmp_path):
    for number, size in enumerate([0, 1, 1000, 3_000_000]):
        content = os.urandom(size)
        envelope = store.publish(revision(number), source(tmp_path, content))
        assert envelope == Envelope(revision(number), hashlib.sha256(content).hexdigest(), size)
        assert store.verify(revision(number)) == envelope
        assert store.fetch(revision(number), tmp_path / "deep" / "folder" / str(number)) == envelope
        assert (tmp_path / "deep" / "folder" / str(number)).read_bytes() == content
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == ["0", "1", "2", "3"]
    listed = list(store.list())
    assert [each.revision_id for each in listed] == sorted(map(revision, range(4)))
    assert sum(each.num_bytes for each in listed) == 4 * ENVELOPE_BYTES + 3_001_001
    assert all(abs(each.modified_s - time.time()) < 60 for each in listed)
    assert all(store.find(each.revision_id) == each for each in listed)
    assert num_incoming(store) == 0


def test_uploads_and_reads_of_several_parts(store, tmp_path):
    content = os.urandom(1000) * 17_000  # more than two chunks of 8 MiB
    store.publish(revision(1), source(tmp_path, content))
    store.fetch(revision(1), tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == content


@pytest.fixture
def s3_requests(s3) -> Iterator[list[str]]:
    """What the S3 double was asked: methods, and the status of the answer."""
    asked: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: asked.append(re.sub(r"\x1b\[\d+m", "", record.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("werkzeug")
    before = log.level, log.disabled
    log.setLevel(logging.INFO)
    log.disabled = False
    log.addHandler(handler)
    try:
        yield asked
    finally:
        log.removeHandler(handler)
        log.level, log.disabled = before


@pytest.mark.parametrize("size", [0, 5, 2 * S3_PART - ENVELOPE_BYTES - 1])
def test_a_small_object_is_read_in_one_request(s3, s3_requests, tmp_path, size):
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", s3)
    content = os.urandom(size)
    store.publish(revision(1), source(tmp_path, content))
    s3_requests.clear()
    claimed, rest = store.begin_read(revision(1))
    assert claimed.content_bytes == size
    assert list(rest) == [*([content] if content else []), claimed]
    assert len(s3_requests) == 1, s3_requests
    assert '"GET ' in s3_requests[0]


@pytest.mark.parametrize("claimed", [None, 1, "size", 1 << 40])
@pytest.mark.parametrize("size", [2 * S3_PART, 2 * S3_PART + 1, 7 * S3_PART - 1, 7 * S3_PART])
def test_parts_of_an_object_are_asked_for_ahead(s3, s3_requests, tmp_path, size, claimed):
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", s3)
    store._objects.write("large", [content := os.urandom(size)])
    s3_requests.clear()
    claims = {None: None, "size": lambda _: size}.get(claimed, lambda _: claimed)
    parts = store._objects.read("large", claims)
    first = next(parts)
    assert len(s3_requests) == 1, s3_requests
    second = next(parts, b"")
    ahead = {None: 1, 1: 1, "size": min(max(-(-size // S3_PART) - 2, 1), 4), 1 << 40: 4}[claimed]
    deadline = time.monotonic() + 10
    while len(s3_requests) < 1 + ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(s3_requests) == 1 + ahead, s3_requests  # and no more before somebody reads on
    assert first + second + b"".join(parts) == content
    assert all('"GET ' in each for each in s3_requests)
    assert sum(" 206 " in each for each in s3_requests) == -(-size // S3_PART) - 1
    if claimed == "size":
        assert len(s3_requests) == size // S3_PART  # the last one says that it is the last


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


def test_many_publishers_of_the_same_revisions(store, tmp_path):
    sources = [source(tmp_path, os.urandom(50_000)) for _ in range(3)]

    def publish(thread: int) -> None:
        for number in (thread % 3, (thread + 1) % 3):
            store.publish(revision(number), sources[number])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(publish, range(16)))
    assert [each.revision_id for each in store.list()] == sorted(map(revision, range(3)))
    assert num_incoming(store) == 0
    for number, path in enumerate(sources):
        store.fetch(revision(number), tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == path.read_bytes()


DAMAGES = {
    "empty": lambda data: b"",
    "half an envelope": lambda data: data[:40],
    "another magic": lambda data: b"x" + data[1:],
    "another revision": lambda data: data[:16] + bytes(32) + data[48:],
    "another digest": lambda data: data[:48] + bytes(32) + data[80:],
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "a bit": lambda data: data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
}


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
            name in ("a bit", "cut", "longer", "another digest")
        )
        with pytest.raises(StoreCorrupt):
            store.verify(revision(number))
        assert fetched.read_bytes() == b"before"
        assert not list(tmp_path.glob(".fetched*"))
        store.publish(revision(number), source(tmp_path, content))
        store.fetch(revision(number), fetched)
        assert fetched.read_bytes() == content


def test_quarantine_keeps_the_bytes(store, tmp_path):
    store.publish(revision(1), source(tmp_path, b"content"))
    overwrite(store, key_of(revision(1)), b"damaged")
    key = store.quarantine(revision(1))
    assert not store.exists(revision(1))
    assert raw(store, key) == b"damaged"


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


def test_a_source_that_changes_meanwhile_publishes_nothing(store, tmp_path, monkeypatch):
    path = source(tmp_path, b"content")
    write = store._objects.write

    def write_what_was_changed(key, chunks):
        path.write_bytes(b"CONTENT")
        write(key, chunks)

    monkeypatch.setattr(store._objects, "write", write_what_was_changed)
    with pytest.raises(StoreCorrupt, match=hashlib.sha256(b"CONTENT").hexdigest()):
        store.publish(revision(1), path)
    assert not store.exists(revision(1))
    assert num_incoming(store) == 0


def test_a_clean_up_that_deletes_what_is_being_published(store, tmp_path, monkeypatch):
    move = store._objects.move

    def move_what_was_deleted(temporary, key):
        store._objects.delete(temporary)
        move(temporary, key)

    monkeypatch.setattr(store._objects, "move", move_what_was_deleted)
    with pytest.raises(StoreUnavailable, match="was deleted while it was published"):
        store.publish(revision(1), source(tmp_path, b"content"))
    assert not store.exists(revision(1))


def test_only_what_is_incoming_is_deleted_as_left_over(store, tmp_path):
    store.publish(revision(1), source(tmp_path, b"content"))
    overwrite(store, "incoming/abandoned", b"half")
    assert list(store.incoming_older_than(3600)) == []
    (left_over,) = store.incoming_older_than(0)
    assert (left_over.key, left_over.num_bytes) == ("incoming/abandoned", 4)
    store.delete_left_over(left_over)
    assert num_incoming(store) == 0
    with pytest.raises(ValueError, match="is not under incoming/"):
        store.delete_left_over(type(left_over)(key_of(revision(1)), 0, 0))
    assert store.exists(revision(1))


def test_uploads_that_break_off_leave_no_parts(s3, tmp_path):
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", s3)
    seen = []

    def breaks_off() -> Iterator[bytes]:
        yield bytes(9_000_000)
        seen.extend(store.incoming_older_than(0))
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        store._objects.write("incoming/one", breaks_off())
    assert [(each.key, each.upload_id is not None) for each in seen] == [("incoming/one", True)]
    assert num_incoming(store) == 0


def test_parts_that_a_killed_publisher_left_are_deleted(s3, tmp_path):
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", s3)
    for name in ("incoming/one", "incoming/two", "elsewhere/three"):
        store._objects._filesystem.call_s3(
            "create_multipart_upload", Bucket=BUCKET, Key=f"{tmp_path.name}/{name}", ContentType="x"
        )
    years_s = 365 * 86_400  # this server has begun every upload in 2010
    assert list(store.incoming_older_than(50 * years_s)) == []
    left_over = list(store.incoming_older_than(0))
    assert sorted(each.key for each in left_over) == ["incoming/one", "incoming/two"]
    for each in left_over:
        store.delete_left_over(each)
        store.delete_left_over(each)
    assert num_incoming(store) == 0


@pytest.mark.slow
def test_foreign_objects_are_not_listed(store, tmp_path):
    store.publish(revision(1), source(tmp_path, b"content"))
    digits = revision(2).removeprefix("sha256:")
    for key in ("revisions/readme", f"revisions/zz/{digits}", f"revisions/{digits[:2]}/{digits}.part"):
        overwrite(store, key, b"foreign")
        assert revision_of(key) is None
    assert [each.revision_id for each in store.list()] == [revision(1)]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def quick(port: int, max_attempts: int) -> S3Access:
    access = S3Access(f"http://127.0.0.1:{port}", "eu-central-1", "test", "test")
    return replace(access, connect_timeout_s=1, read_timeout_s=0.5, max_attempts=max_attempts)


def test_an_endpoint_that_refuses_or_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="s3://adapters/x failed at"):
            open_store("s3://adapters/x", quick(port, 1)).exists(revision(1))
        assert time.monotonic() - started < 20
    with pytest.raises(StoreUnavailable, match="s3://adapters/x failed at"):
        open_store("s3://adapters/x", quick(port, 1)).exists(revision(1))


@contextmanager
def failing_in_front_of(endpoint: str, num_failures: int) -> Iterator[tuple[int, list[str]]]:
    """A server that answers 503 to so many requests, and sends later ones on. (its port, the requests it got)"""
    import requests

    seen: list[str] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            with lock:
                seen.append(f"{self.command} {self.path}")
                is_failure = len(seen) <= num_failures
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if is_failure:
                status, headers, data = 503, {}, b""
            else:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                reply = requests.request(self.command, endpoint + self.path, headers=headers, data=body, timeout=10)
                status, headers, data = reply.status_code, reply.headers, reply.content
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() in ("etag", "last-modified", "content-type", "content-range"):
                    self.send_header(name, value)
            length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(data))
            self.send_header("content-length", length)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_a_few_failures_are_tried_again_and_many_are_not(s3, tmp_path):
    open_store("s3://adapters/retries", s3).publish(revision(1), source(tmp_path, b"content"))
    with failing_in_front_of(s3.endpoint_url, num_failures=1) as (port, seen):
        assert open_store("s3://adapters/retries", quick(port, 2)).exists(revision(1))
        assert len(seen) == 2
    with failing_in_front_of(s3.endpoint_url, num_failures=1000) as (port, seen):
        with pytest.raises(StoreUnavailable, match="s3://adapters/retries failed at"):
            open_store("s3://adapters/retries", quick(port, 2)).exists(revision(1))
        assert 2 <= len(seen) <= 4


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=300), sizes=st.lists(st.integers(1, 100), min_size=1), data=st.data())
def test_any_change_of_an_object_is_found(content, sizes, data):
    envelope = Envelope(revision(1), hashlib.sha256(content).hexdigest(), len(content))
    whole = envelope.encode() + content

    def read(stored: bytes) -> list[bytes | Envelope]:
        def chunks() -> Iterator[bytes]:
            begin, number = 0, 0
            while begin < len(stored):
                yield stored[begin : begin + sizes[number % len(sizes)]]
                begin, number = begin + sizes[number % len(sizes)], number + 1

        return list(content_of(chunks(), "key", revision(1)))

    *parts, last = read(whole)
    assert b"".join(parts) == content
    assert last == envelope
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    for changed in (flipped, whole[:place], whole + data.draw(st.binary(min_size=1))):
        with pytest.raises(StoreCorrupt):
            read(changed)


def test_every_error_says_how_it_is_answered():
    classes = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, AdapterError)
    ]  # fmt: skip
    assert len(classes) == 7
    assert len({each.code for each in classes}) == 7
    assert all(each.__name__ in errors.__doc__ for each in classes)
    assert [each for each in classes if each.retryable] == [StoreUnavailable]
