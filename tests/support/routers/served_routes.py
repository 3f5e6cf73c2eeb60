"""An HTTP server on a free port of this machine, for stand-ins of one or two routes."""

import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def served(routes: Iterable[web.RouteDef]) -> AsyncIterator[str]:
    """Its URL, for as long as the context lasts."""
    runner, port = await serve(routes)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await kill(runner)


async def serve(
    routes: Iterable[web.RouteDef], port: int = 0, tls: ssl.SSLContext | None = None, **application: Any
) -> tuple[web.AppRunner, int]:
    """Start the server; its runner, which `kill` ends, and its port."""
    app = web.Application(**application)
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    return runner, runner.addresses[0][1]


async def kill(runner: web.AppRunner) -> None:
    """End a server as the kernel ends a killed process's: all connections close at once, answers in flight are cut.

    `cleanup` alone lets handlers finish first, with a shutdown_timeout of 0 for however long that takes. The runner
    needs `handler_cancellation`. One that has ended stays so.
    """
    for site in runner.sites:
        await site.stop()
    for connection in runner.server.connections if runner.server is not None else ():
        if connection.transport is not None:
            connection.transport.abort()
    await runner.cleanup()
