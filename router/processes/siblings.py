"""The other processes of this router. Each serves a few pages on a Unix socket, in a folder that only they can read.

Whichever process gets a scrape or an operator's request asks the others and answers for all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from cluster.errors import ConfigError
from process.addresses import host_and_port

_ASK_TIMEOUT_S = 1.0  # for all of them together: they are on this machine


@dataclass(frozen=True, slots=True)
class Siblings:
    """This process's access to all processes of its router."""

    number: int  # of this process, from 0
    count: int
    folder: Path

    @property
    def router_id(self) -> str:
        """Shared by all processes of a router, and new at each start: it comes from their folder's random name."""
        return self.folder.name.rpartition("-")[2]

    @asynccontextmanager
    async def serving(self, pages: Mapping[str, Callable[[], bytes]]) -> AsyncIterator[None]:
        """Serve these pages to the other processes inside the block. `pages`: by name."""
        app = web.Application()
        for name, page in pages.items():
            app.router.add_get(f"/{name}", _handler(page))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(self._socket(self.number))).start()
            yield
        finally:
            await runner.cleanup()

    async def ask(self, page: str) -> dict[int, bytes]:
        """The page of every other process, by process number. Processes that do not answer in time are left out."""
        others = [number for number in range(self.count) if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, page) for number in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer is not None}

    async def _ask(self, number: int, page: str) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        connector = aiohttp.UnixConnector(str(self._socket(number)))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(f"http://router/{page}") as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None  # it starts, or has just ended

    def _socket(self, number: int) -> Path:
        return self.folder / f"{number}.sock"


def bound_listener(field: str, host: str, port: int, *, share: bool) -> socket.socket:
    """A socket bound to the port that a field of cluster.yaml names. Raises ConfigError.

    Listeners with `share` share the port, and the kernel spreads connections over them.
    """
    try:
        return _bound(host, port, share=share)
    except OSError as error:
        where = host_and_port(host, port)
        raise ConfigError(f"{field}: {where} is not available ({error.strerror}); choose another") from error


def _bound(host: str, port: int, *, share: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _handler(page: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=page())

    return answer
