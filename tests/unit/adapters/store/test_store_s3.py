"""What holds for a store in S3 only: parts, uploads that break off, and endpoints that fail."""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.adapters.s3_server import BUCKET
from support.adapters.stored_objects import num_incoming, revision, source

from adapters.store import (
    S3Access,
    StoreUnavailable,
    open_store,
)
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


def quick(port: int, max_attempts: int, connect_timeout_s: float = 1, read_timeout_s: float = 0.5) -> S3Access:
    return S3Access(
        f"http://127.0.0.1:{port}",
        "eu-central-1",
        "test",
        "test",
        connect_timeout_s=connect_timeout_s,
        read_timeout_s=read_timeout_s,
        max_attempts=max_attempts,
    )


@pytest.mark.slow
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
        assert open_store("s3://adapters/retries", quick(port, 2, 30, 30)).exists(revision(1))
        assert len(seen) == 2
    with failing_in_front_of(s3.endpoint_url, num_failures=1000) as (port, seen):
        with pytest.raises(StoreUnavailable, match="s3://adapters/retries failed at"):
            open_store("s3://adapters/retries", quick(port, 2, 30, 30)).exists(revision(1))
        assert 2 <= len(seen) <= 4
