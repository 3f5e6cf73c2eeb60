"""What holds for a store in S3 only: parts, uploads that break off, and endpoints that fail."""

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from support.adapters.s3_server import BUCKET
from support.adapters.stored_objects import num_incoming, revision, source
from support.in_thread import in_thread
from support.routers.served_routes import served

from adapters.store import S3Access, StoreUnavailable, open_store
from adapters.store.envelope import ENVELOPE_BYTES

S3_PART = 4 * 1024**2  # but for the first, which is twice as long


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    deadline = time.monotonic() + 60
    while len(s3_requests) < 1 + ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(s3_requests) == 1 + ahead, s3_requests  # and no more before somebody reads on
    assert first + second + b"".join(parts) == content
    assert all('"GET ' in each for each in s3_requests)
    assert sum(" 206 " in each for each in s3_requests) == -(-size // S3_PART) - 1
    if claimed == "size":
        assert len(s3_requests) == size // S3_PART  # the last one says that it is the last


@pytest.mark.slow
def test_uploads_that_break_off_leave_no_parts(s3, tmp_path):
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}", s3)
    counts = []

    def count_uploads() -> None:
        page = store._objects._filesystem.call_s3(
            "list_multipart_uploads", Bucket=BUCKET, Prefix=f"{tmp_path.name}/incoming/"
        )
        counts.append(len(page.get("Uploads", [])))

    def breaks_off() -> Iterator[bytes]:
        yield bytes(9_000_000)
        count_uploads()
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        store._objects.write("incoming/one", breaks_off())
    count_uploads()
    assert counts == [1, 0]
    assert num_incoming(store) == 0


IMPATIENT = {"max_attempts": 1, "connect_timeout_s": 1, "read_timeout_s": 0.5}


def access_to(port: int, **options: Any) -> S3Access:
    return S3Access(f"http://127.0.0.1:{port}", "eu-central-1", "test", "test", **options)


@pytest.mark.slow
def test_an_endpoint_that_refuses_or_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="s3://adapters/x failed at"):
            open_store("s3://adapters/x", access_to(port, **IMPATIENT)).exists(revision(1))
        assert time.monotonic() - started < 20
    with pytest.raises(StoreUnavailable, match="s3://adapters/x failed at"):
        open_store("s3://adapters/x", access_to(port, **IMPATIENT)).exists(revision(1))


@pytest.mark.slow
def test_failures_are_tried_again_so_often():
    seen: list[str] = []

    async def fail(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.Response(status=503)

    with in_thread(served([web.get("/{path:.*}", fail)])) as url:
        patient = access_to(int(url.rpartition(":")[2]), max_attempts=3)
        with pytest.raises(StoreUnavailable, match="s3://adapters/retries failed at"):
            open_store("s3://adapters/retries", patient).exists(revision(1))
    assert 3 <= len(seen) <= 6
