"""An HTTP server on a free port of this machine, for stand-ins of one or two routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(routes: Iterable[web.RouteDef]) -> AsyncIterator[str]:
    """Its URL, for as long as the context lasts."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
