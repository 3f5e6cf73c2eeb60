"""Both listeners see the requests that another parser sees, whatever frames a body and however it arrives.

A proxy before the router shares one connection between clients. If the two disagree about where a request ends, one
client's body is another's request, and each gets the other's answer.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from support.http.listener import listening
from support.http.reference_framing import Message, framing_of

from router.http import admin_listener
from router.http.client_connection import SCOPE_KEY
from router.http.connections import ConnectionLimits

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH = b"content-length: %d\r\n" % len(SMUGGLED)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x;a=b\r\n%b\r\n0\r\nx-trailer: a\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: anything\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"

# What frames the body (headers, body). The first part is served as the other parser reads it; the second is refused.
SERVED = {
    "none": (b"", b""),
    "a length": (LENGTH, SMUGGLED),
    "a length of zero": (b"content-length: 0\r\n", b""),
    "a length in capitals": (LENGTH.upper(), SMUGGLED),
    "a length with zeros and blanks": (b"content-length:  \t00%d \t\r\n" % len(SMUGGLED), SMUGGLED),
    "an upgrade": (UPGRADE, b""),
    "an upgrade and a length": (UPGRADE + LENGTH, SMUGGLED),
    "a length and an upgrade": (LENGTH + UPGRADE, SMUGGLED),
    "an upgrade and a length of zero": (UPGRADE + b"content-length: 0\r\n", b""),
    "an upgrade in other words": (b"Upgrade: websocket, h2c\r\nConnection: foo, UPGRADE\r\n" + LENGTH, SMUGGLED),
    "an upgrade that no connection names": (b"upgrade: anything\r\n" + LENGTH, SMUGGLED),
    "a connection that names no upgrade": (b"connection: upgrade\r\n" + LENGTH, SMUGGLED),
    "a length and h2c": (H2C + LENGTH, SMUGGLED),
    "a length, an expectation and h2c": (H2C + LENGTH + b"expect: 100-continue\r\n", SMUGGLED),
    "other headers that are like these": (b"x-content-length: 3\r\ncontent-lengths: 3\r\nte: chunked\r\n", b""),
}
SERVED_BY_HTTP_1_1 = {
    "chunks": (CHUNKED, CHUNKS),
    "chunks in capitals": (b"TRANSFER-ENCODING: \tChunKed \r\n", CHUNKS),
    "an upgrade and chunks": (UPGRADE + CHUNKED, CHUNKS),
    "chunks and an upgrade": (CHUNKED + UPGRADE, CHUNKS),
    "h2c and chunks": (H2C + CHUNKED, CHUNKS),
    "chunks with framing in the trailer": (CHUNKED, b"0\r\nupgrade: a\r\nconnection: upgrade\r\nhost: y\r\n\r\n"),
}
REFUSED = {
    "two lengths": (LENGTH + b"content-length: 0\r\n", SMUGGLED),
    "the same length twice": (LENGTH + LENGTH, SMUGGLED),
    "an upgrade and two lengths": (UPGRADE + b"content-length: 0\r\n" + LENGTH, SMUGGLED),
    "lengths in a list": (b"content-length: %d, %d\r\n" % (len(SMUGGLED), len(SMUGGLED)), SMUGGLED),
    "no length": (b"content-length:\r\n", SMUGGLED),
    "a length with a sign": (b"content-length: +%d\r\n" % len(SMUGGLED), SMUGGLED),
    "a length in hex": (b"content-length: 0x%x\r\n" % len(SMUGGLED), SMUGGLED),
    "a length with an underscore": (b"content-length: 3_6\r\n", SMUGGLED),
    "a length and chunks": (LENGTH + CHUNKED, CHUNKS),
    "chunks and a length": (CHUNKED + LENGTH, CHUNKS),
    "an upgrade, chunks and a length": (UPGRADE + CHUNKED + LENGTH, CHUNKS),
    "a length, chunks and an upgrade": (LENGTH + CHUNKED + UPGRADE, CHUNKS),
    "chunks twice": (CHUNKED + CHUNKED, CHUNKS),
    "an upgrade and chunks twice": (UPGRADE + CHUNKED + CHUNKED, CHUNKS),
    "chunked, chunked": (b"transfer-encoding: chunked, chunked\r\n", CHUNKS),
    "gzip, chunked": (b"transfer-encoding: gzip, chunked\r\n", CHUNKS),
    "an upgrade and gzip, chunked": (UPGRADE + b"transfer-encoding: gzip, chunked\r\n", CHUNKS),
    "gzip and chunked": (b"transfer-encoding: gzip\r\n" + CHUNKED, CHUNKS),
    "chunked, identity": (b"transfer-encoding: chunked, identity\r\n", CHUNKS),
    "identity": (b"transfer-encoding: identity\r\n" + LENGTH, SMUGGLED),
    "xchunked": (b"transfer-encoding: xchunked\r\n", CHUNKS),
    "an empty encoding": (b"transfer-encoding:\r\n" + LENGTH, SMUGGLED),
    "a tab in the name": (b"transfer-encoding\t: chunked\r\n", CHUNKS),
    "an upgrade with a folded header": (UPGRADE + b"x: a\r\n b\r\n" + LENGTH, SMUGGLED),
    "an upgrade with a bare LF": (UPGRADE + b"x: a\ncontent-length: 0\r\n" + LENGTH, SMUGGLED),
    "two hosts": (b"host: y\r\n" + LENGTH, SMUGGLED),
    "an upgrade and two hosts": (UPGRADE + b"host: y\r\n" + LENGTH, SMUGGLED),
}
LISTENERS = ("clients", "clients with TLS", "admin")


class Seen:
    """An application that notes each whole request under the connection's name, which is its first target."""

    def __init__(self) -> None:
        self.by_peer: dict[Any, list[Message]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with suppress(ClientDisconnect):
            body, query = await Request(scope, receive).body(), scope["query_string"].decode()
            target = scope["raw_path"].decode() + (f"?{query}" if query else "")
            self.by_peer[scope["client"]].append(Message(scope["method"], target, body))
            scope[SCOPE_KEY].whole(200, target.encode(), {})


@asynccontextmanager
async def serving(kind: str, folder: Path) -> AsyncIterator[tuple[int, ssl.SSLContext | None, Seen]]:
    app = Seen()
    if kind == "admin":
        bound = socket.create_server(("127.0.0.1", 0), backlog=1024)
        async with admin_listener.serving(app, bound, ConnectionLimits()):
            yield bound.getsockname()[1], None, app
        return
    async with listening(folder if kind == "clients with TLS" else None) as listener:
        listener.app = app  # type: ignore[method-assign]
        yield listener.bound.getsockname()[1], listener.trusting, app


async def served(
    parts: Sequence[bytes], port: int, context: ssl.SSLContext | None, app: Seen
) -> tuple[list[Message], bytes]:
    """The requests of one connection that the listener has served, and what it answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    seen, answer = app.by_peer.setdefault(writer.get_extra_info("sockname"), []), b""
    seen.clear()  # of an earlier connection from this port
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)  # for the listener to read it; the outcome is the same if it has not
        if framing_of(b"".join([*parts, LAST])).messages[-1:] == [Message("GET", "/last", b"")]:
            writer.write(LAST)  # closes a connection that is still open
        while part := await reader.read(65536):
            answer += part
    except (ConnectionError, ssl.SSLError, RuntimeError):  # RuntimeError: uvloop's, of a closed connection
        pass  # the listener had closed while this side was still sending
    finally:
        writer.transport.abort()
    return [each for each in seen if each.target != "/last"], answer


def requests(framings: dict[str, tuple[bytes, bytes]], versions: Sequence[bytes]) -> list[tuple[str, list[bytes]]]:
    """Each framing in a request and one behind it, in every division into pieces: (name, pieces)."""
    cases = []
    for (name, (headers, body)), version, closes in product(framings.items(), versions, (False, True)):
        connection = b"connection: close\r\n" if closes else b"connection: keep-alive\r\n" if version == b"1.0" else b""
        head = b"POST /first HTTP/%b\r\nhost: x\r\n%b%b\r\n" % (version, connection, headers)
        following = b"GET /second?a=b HTTP/1.1\r\nhost: x\r\n\r\n"
        for pieces in (
            [head + body + following],
            [head, body + following],
            [head + body, following],
            [head, body, following],
            [head[:-1], head[-1:] + body[:1], body[1:] + following[:5], following[5:]],
        ):
            label = f"{name}, HTTP/{version.decode()}, {'closing' if closes else 'open'}, {len(pieces)} pieces"
            cases.append((label, [piece for piece in pieces if piece]))
    return cases


async def run(
    kind: str, folder: Path, cases: list[tuple[str, list[bytes]]]
) -> list[tuple[str, list[bytes], list[Message], bytes]]:
    """The name and the pieces of each case, the requests that were served, and the answer."""
    outcomes: list[Any] = []
    async with serving(kind, folder) as (port, context, app):
        for some in (cases[first : first + 100] for first in range(0, len(cases), 100)):
            outcomes += await asyncio.gather(*(served(parts, port, context, app) for _, parts in some))
    return [(*case, *outcome) for case, outcome in zip(cases, outcomes, strict=True)]


@pytest.mark.parametrize("kind", LISTENERS)
async def test_requests_end_where_another_parser_sees_their_end(kind: str, tmp_path: Path):
    cases = requests(SERVED, [b"1.1", b"1.0"]) + requests(SERVED_BY_HTTP_1_1, [b"1.1"])
    for label, parts, seen, answer in await run(kind, tmp_path, cases):
        expected = framing_of(b"".join(parts)).messages
        assert expected, label
        assert seen == expected, (label, answer)
        assert b"/smuggled" not in answer, label


@pytest.mark.parametrize("kind", LISTENERS)
async def test_what_two_parsers_may_frame_differently_is_not_read(kind: str, tmp_path: Path):
    cases = requests(REFUSED, [b"1.1", b"1.0"]) + requests(SERVED_BY_HTTP_1_1, [b"1.0"])
    tunnels = (b"CONNECT x:1", b"CONNECT /x", b"CONNECT http://x/")
    for start, length, pieces in product(tunnels, (b"", LENGTH), (1, 2)):
        head = b"%b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (start, length)
        cases.append((start.decode(), [head + SMUGGLED] if pieces == 1 else [head, SMUGGLED]))
    for label, _, seen, answer in await run(kind, tmp_path, cases):
        assert seen == [], label
        # Gone where the listener closed before all was sent.
        assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400 ") <= 1, label


async def test_the_answer_to_an_upgrade_says_that_the_connection_closes(tmp_path: Path):
    cases = [each for each in requests({"": (UPGRADE + LENGTH, SMUGGLED)}, [b"1.1"]) if len(each[1]) == 1]
    for label, _, _, answer in await run("clients", tmp_path, cases):
        head = answer.partition(b"\r\n\r\n")[0]
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), label
        assert b"\r\nconnection: close" in head, label
        assert answer.count(b"HTTP/1.1 200") == 1, label
