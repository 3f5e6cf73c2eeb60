"""A router that stops answers clients that connected before: accepted or not, with a request or about to send one."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.clusters.certificates import authority, issued

from cluster.config.load import load_cluster_config
from process.certificates.contexts import make_pinned_context
from router.http.client_connection import SCOPE_KEY
from router.http.connections import ClientConnections, ConnectionLimits
from router.server import RouterServer, client_tls, uvicorn_config

CLUSTER = """\
model: {{path: model, name: demo}}
workers:
  unified-0: {{role: unified}}
router: {{tls: {tls}}}
"""
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
ENOUGH_S = 30.0  # on a machine that stalls


@dataclass
class Router:
    """The router's server around an application that answers with the path, on uvloop as in production."""

    server: RouterServer
    bound: socket.socket
    address: tuple[str, int]
    stack: ExitStack
    trusting: ssl.SSLContext | None

    def connected(self, first: bytes = b"") -> socket.socket:
        """A connection that the system has made, and the event loop has not accepted: it has not run since."""
        opened = self.stack.enter_context(socket.create_connection(self.address, timeout=ENOUGH_S))
        opened.sendall(first)
        opened.setblocking(False)
        return opened

    async def accepted(self, count: int = 1) -> list[socket.socket]:
        found = [self.connected() for _ in range(count)]
        while len(self.server.server_state.connections) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return found

    async def stop(self) -> float:
        """Stop it; returns the seconds that it took."""
        began = time.monotonic()
        await self.server.shutdown([self.bound])
        return time.monotonic() - began


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for done in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{done}.complete"})
        return
    scope[SCOPE_KEY].whole(200, scope["path"].encode(), {})


def run(folder: Path, scenario: Callable[[Router], Coroutine[Any, Any, None]], *, tls: bool = False) -> None:
    files = issued(authority(folder / "certs"), "router", "router", hosts=("127.0.0.1",)) if tls else None
    named = "null" if files is None else f"{{certificate: {files.certificate}, key: {files.key}}}"
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.format(tls=named))
    config = load_cluster_config(path)

    @asynccontextmanager
    async def started() -> AsyncIterator[Router]:
        connections = ClientConnections(ConnectionLimits.of(config.router))
        server = RouterServer(uvicorn_config(app, config, connections, client_tls(config)), connections)
        bound = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server._serve([bound]))
        with ExitStack() as stack:
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            serving.cancel()  # its loop only waits for a signal
            yield Router(
                server,
                bound,
                bound.getsockname(),
                stack,
                None if files is None else make_pinned_context(files.certificate),
            )

    async def scene() -> None:
        async with asyncio.timeout(120), started() as router:
            await scenario(router)

    uvloop.run(scene())


async def answer_of(opened: socket.socket) -> bytes:
    """What arrives before the other end closes."""
    data = b""
    while part := await asyncio.get_running_loop().sock_recv(opened, 65536):
        data += part
    return data


def is_last_answer(data: bytes) -> bool:
    return data.startswith(b"HTTP/1.1 200") and b"connection: close" in data and data.endswith(b"/")


def test_connections_that_wait_to_be_accepted_are_answered(tmp_path: Path):
    async def scenario(router: Router) -> None:
        opened = [router.connected(GET) for _ in range(5)]
        await router.stop()  # begins at once, before the event loop runs again
        assert all(map(is_last_answer, await asyncio.gather(*map(answer_of, opened))))
        with pytest.raises(ConnectionRefusedError):
            router.connected()

    run(tmp_path, scenario)


def test_a_new_connection_may_still_send_its_request(tmp_path: Path):
    async def scenario(router: Router) -> None:
        opened, unread, silent = await router.accepted(3)
        stopping = asyncio.create_task(router.stop())
        unread.send(GET)
        await asyncio.sleep(0.3)
        opened.send(GET)
        assert is_last_answer(await answer_of(opened))
        assert is_last_answer(await answer_of(unread))
        assert await answer_of(silent) == b""
        assert await stopping < ENOUGH_S

    run(tmp_path, scenario)


@pytest.mark.parametrize("sends", [False, True])
def test_an_idle_connection_is_closed_unless_a_request_has_come(tmp_path: Path, sends: bool):
    async def scenario(router: Router) -> None:
        (opened,) = await router.accepted()
        opened.send(GET)
        first = await asyncio.get_running_loop().sock_recv(opened, 65536)
        assert b"200" in first
        assert b"connection: close" not in first
        if sends:
            opened.send(GET)  # the event loop has not read it when the router stops
        took_s = await router.stop()
        last = await answer_of(opened)
        assert is_last_answer(last) if sends else last == b""
        assert took_s < ENOUGH_S

    run(tmp_path, scenario)


def test_a_handshake_that_has_begun_and_its_request_are_served(tmp_path: Path):
    async def scenario(router: Router) -> None:
        assert router.trusting is not None
        begun, silent = await router.accepted(2)
        stopping = asyncio.create_task(router.stop())
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection(sock=begun, ssl=router.trusting, server_hostname="127.0.0.1")
        writer.write(GET)
        assert is_last_answer(await reader.read())
        writer.close()
        assert await answer_of(silent) == b""
        assert await stopping < ENOUGH_S

    run(tmp_path, scenario, tls=True)
