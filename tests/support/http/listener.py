"""The router's server around an application that notes what it is asked, in the clear or with TLS."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from support.clusters.certificates import authority, issued
from support.clusters.configs import config_of
from support.waiting import until

from process.certificates.contexts import make_pinned_context
from router.http.client_connection import SCOPE_KEY
from router.http.connections import ClientConnections, ConnectionLimits
from router.server import RouterServer, client_tls, uvicorn_config

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ENOUGH_S = 120.0  # on a machine that stalls
_SIZES = {"/large": 16 * 2**20, "/some": 16 * 2**10}


@dataclass
class Listener:
    server: RouterServer
    serving: asyncio.Task[None]
    bound: socket.socket
    connections: ClientConnections
    trusting: ssl.SSLContext | None  # None: there is no TLS
    stack: ExitStack  # closes what clients have opened
    refused: list[str]
    seen: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, bytes of the body
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)  # requests for /wait

    async def open(self, first: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.bound.getsockname(), ssl=self.trusting)
        self.stack.callback(writer.transport.abort)
        writer.write(first)
        return reader, writer

    async def ask(self, *parts: bytes) -> bytes:
        """Everything that comes back before the connection is closed."""
        reader, writer = await self.open()
        try:
            for part in parts:
                if not writer.is_closing():  # uvloop refuses to write to a closed connection
                    writer.write(part)
                await asyncio.sleep(0.01)
            return await until_closed(reader)
        finally:
            writer.transport.abort()

    def connected(self, first: bytes = b"", buffer_bytes: int | None = None) -> socket.socket:
        """A connection that the system has made, which sends this in the clear.

        The event loop has not accepted it: it has not run since.
        """
        opened = self.stack.enter_context(socket.socket())
        if buffer_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        opened.settimeout(ENOUGH_S)
        opened.connect(self.bound.getsockname())
        opened.sendall(first)
        opened.setblocking(False)
        return opened

    async def stop(self) -> None:
        """Stop the server, in time."""
        self.serving.cancel()  # its loop only waits for a signal
        async with asyncio.timeout(ENOUGH_S):
            await self.server.shutdown([self.bound])

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        path = scope["path"]
        self.seen.append((scope["method"], path, len(body)))
        self.headers.append(dict(scope["headers"]))
        if path == "/wait":
            await self.may_answer.wait()
        scope[SCOPE_KEY].whole(200, bytes(_SIZES[path]) if path in _SIZES else path.encode(), {})
        await scope[SCOPE_KEY].is_drained(3600)


async def until_closed(source: asyncio.StreamReader | socket.socket) -> bytes:
    """What arrives before the other end closes."""
    loop, data = asyncio.get_running_loop(), b""
    read = source.read if isinstance(source, asyncio.StreamReader) else partial(loop.sock_recv, source)
    with suppress(ConnectionError):
        async with asyncio.timeout(ENOUGH_S):
            while part := await read(65536):
                data += part
    return data


@asynccontextmanager
async def listening(folder: Path | None = None, **limits: Any) -> AsyncIterator[Listener]:
    """`folder`: where certificates are made; without one there is no TLS."""
    tls, trusting = None, None
    if folder is not None:
        files = issued(authority(folder / "certs"), "router", "router", hosts=("127.0.0.1",))
        tls = {"certificate": str(files.certificate), "key": str(files.key)}
        trusting = make_pinned_context(files)
    config, refused = config_of({"u0": "unified"}, router={"tls": tls}), list[str]()
    connections = ClientConnections(ConnectionLimits(**limits), refused.append)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await listener.app(scope, receive, send)

    server = RouterServer(uvicorn_config(app, config, connections, client_tls(config)), connections)
    bound = socket.create_server(("127.0.0.1", 0), backlog=4096)
    serving = asyncio.create_task(server._serve([bound]))
    with ExitStack() as stack:
        listener = Listener(server, serving, bound, connections, trusting, stack, refused)
        try:
            await until(lambda: server.started or serving.done())
            yield listener
        finally:
            listener.may_answer.set()
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await serving
    await until(lambda: not len(connections))
