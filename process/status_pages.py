"""HTTP pages for operators: few routes, an answer per connection, and no connection that stays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NoReturn

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from process.lifetime import meanwhile

_MAX_CONNECTIONS = 128  # the oldest makes way for one more
_CONNECTION_S = 30.0  # for a request and its answer; each connection has one
_SWEEP_S = 1.0

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving_status(
    registry: CollectorRegistry, pages: Mapping[str, Page], host: str, port: int
) -> AsyncIterator[None]:
    """Serve the registry at /metrics, and the pages by their paths. Raises OSError if the port is taken."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.add_routes([web.get(path, page) for path, page in {"/metrics": metrics, **pages}.items()])
    app.on_response_prepare.append(_close_after)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    connections = runner.server
    assert connections is not None

    def accept() -> asyncio.Protocol:
        opened = connections.connections
        for oldest in opened[: max(0, len(opened) - _MAX_CONNECTIONS + 1)]:
            _abort(oldest)
        return connections()

    listener = await asyncio.get_running_loop().create_server(accept, host, port)
    try:
        async with meanwhile(_abort_old(connections)):
            yield
    finally:
        listener.close()
        await runner.cleanup()


async def _close_after(_request: web.Request, response: web.StreamResponse) -> None:
    """Allow one answer per connection, so that a connection's age shows whether its request is late."""
    response.force_close()


async def _abort_old(connections: web.Server) -> NoReturn:
    """End connections that have not been answered in time; aiohttp has no deadline for a request's headers."""
    loop = asyncio.get_running_loop()
    seen_at: dict[web.RequestHandler, float] = {}
    while True:
        await asyncio.sleep(_SWEEP_S)
        now = loop.time()
        seen_at = {each: seen_at.get(each, now) for each in connections.connections}
        for connection, since in seen_at.items():
            if now - since >= _CONNECTION_S:
                _abort(connection)


def _abort(connection: web.RequestHandler) -> None:
    transport = connection.transport
    if transport is not None:
        transport.abort()
