"""Connections of clients before and after their TLS handshake count alike: limits, deadlines, making way."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from support.clusters.certificates import authority, issued

from cluster.config.load import load_cluster_config
from process.certificates.contexts import make_pinned_context
from router.http.client_connection import SCOPE_KEY
from router.http.connections import ClientConnections, ConnectionLimits
from router.server import client_tls, uvicorn_config

CLUSTER = """\
model: {{path: model, name: demo}}
workers:
  unified-0: {{role: unified}}
router:
  tls: {{certificate: {certificate}, key: {key}}}
"""
PATIENT = ConnectionLimits(header_timeout_s=600)
NOT_ALL_OF_A_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # a record of 512 bytes begins
ALERT_OF_TLS_1_2 = b"\x15\x03\x03"


@dataclass
class Listener:
    """The router's server as it is started, around an application that answers or waits."""

    port: int
    connections: ClientConnections
    trusting: ssl.SSLContext
    stack: ExitStack
    refused: list[str] = field(default_factory=list)
    num_waiting: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        if scope["path"] == "/wait":
            self.num_waiting += 1
            await self.may_answer.wait()
        scope[SCOPE_KEY].whole(200, scope["scheme"].encode(), {})

    async def silent(self, first: bytes = b"") -> socket.socket:
        """A connection that sends this and then nothing."""
        opened = self.stack.enter_context(socket.socket())
        opened.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(opened, ("127.0.0.1", self.port))
        await loop.sock_sendall(opened, first)
        return opened

    async def ask(self, path: str = "/") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trusting)
        try:
            writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
            return await reader.read()
        finally:
            writer.transport.abort()


async def until_closed(opened: socket.socket) -> bytes:
    """What arrives before the other end closes."""
    data = b""
    try:
        while part := await asyncio.get_running_loop().sock_recv(opened, 65536):
            data += part
    except ConnectionError:
        pass
    return data


async def eventually(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(folder: Path, limits: ConnectionLimits) -> AsyncIterator[Listener]:
    files = issued(authority(folder / "certs"), "router", "router", hosts=("127.0.0.1",))
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.format(certificate=files.certificate, key=files.key))
    config = load_cluster_config(path)
    refused: list[str] = []
    connections = ClientConnections(limits, refused.append)
    bound = socket.create_server(("127.0.0.1", 0))
    with ExitStack() as stack:
        trusting = make_pinned_context(files.certificate)
        listener = Listener(bound.getsockname()[1], connections, trusting, stack, refused)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await listener.app(scope, receive, send)

        server = uvicorn.Server(uvicorn_config(app, config, connections, client_tls(config)))
        serving = asyncio.create_task(server._serve([bound]))
        try:
            await eventually(lambda: server.started or serving.done())
            yield listener
        finally:
            listener.may_answer.set()
            server.should_exit = True
            await serving
        await eventually(lambda: not len(connections))


def run(folder: Path, limits: ConnectionLimits, scenario: Callable[[Listener], Coroutine[Any, Any, None]]) -> None:
    async def scene() -> None:
        async with asyncio.timeout(120), listening(folder, limits) as listener:
            await scenario(listener)

    uvloop.run(scene())


def test_connections_count_from_the_start_and_harm_nobody(tmp_path: Path):
    async def scenario(listener: Listener) -> None:
        opened = [await listener.silent(first) for first in (b"", NOT_ALL_OF_A_HELLO) * 5]
        await eventually(lambda: len(listener.connections) == 10)
        assert (await listener.ask()).endswith(b"\r\n\r\nhttps")
        await eventually(lambda: len(listener.connections) == 10)
        no_tls = await listener.silent(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until_closed(no_tls)
        gone = opened.pop()
        gone.close()
        await eventually(lambda: len(listener.connections) == 9)

    run(tmp_path, PATIENT, scenario)  # a server that stops does not wait for those that are left


def test_silent_and_half_sent_handshakes_are_closed_in_time(tmp_path: Path):
    async def scenario(listener: Listener) -> None:
        opened = [await listener.silent(first) for first in (b"", NOT_ALL_OF_A_HELLO) * 5]
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*map(until_closed, opened))
        assert asyncio.get_running_loop().time() - began < 40  # the loop's own limit is a minute
        await eventually(lambda: not len(listener.connections))

    run(tmp_path, ConnectionLimits(header_timeout_s=0.5), scenario)


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
def test_handshakes_make_way_for_others_and_requests_do_not(tmp_path: Path, limit: str):
    async def scenario(listener: Listener) -> None:
        pending = [await listener.silent(first) for first in (b"", NOT_ALL_OF_A_HELLO) * 2]
        await eventually(lambda: len(listener.connections) == 4)
        pending.append(await listener.silent())
        assert await until_closed(pending.pop(0)) == b""  # the oldest, at once
        assert len(listener.connections) == 4
        asked = [asyncio.create_task(listener.ask("/wait")) for _ in range(4)]
        await eventually(lambda: listener.num_waiting == 4)
        for each in pending:
            assert await until_closed(each) == b""
        assert listener.refused == []
        assert await until_closed(await listener.silent()) == b""
        assert listener.refused == ["too_many_connections"]
        assert len(listener.connections) == 4
        listener.may_answer.set()
        assert all(answer.endswith(b"https") for answer in await asyncio.gather(*asked))

    run(tmp_path, replace(PATIENT, **{limit: 4}), scenario)


def test_an_idle_client_cannot_keep_the_connection_that_has_to_make_way(tmp_path: Path):
    """It is closed without the alert whose answer the end of TLS would wait for."""

    async def scenario(listener: Listener) -> None:
        listener.trusting.maximum_version = ssl.TLSVersion.TLSv1_2  # where alerts can be told from data
        opened = await listener.silent()
        opened.setblocking(True)
        secured = await asyncio.to_thread(listener.trusting.wrap_socket, opened)
        idle = listener.stack.enter_context(socket.socket(fileno=secured.detach()))
        idle.setblocking(False)
        assert (await listener.ask()).endswith(b"https")
        assert ALERT_OF_TLS_1_2 not in await until_closed(idle)

    run(tmp_path, replace(PATIENT, max_connections=1), scenario)
