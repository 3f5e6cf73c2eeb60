"""Serves the router's admin pages on a listener of their own, for as long as the router serves clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from router.http.client_connection import ClientProtocol

_MAX_CONNECTIONS = 256  # and requests
_STOP_S = 1  # for requests in flight


@asynccontextmanager
async def serving(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an ASGI application without a lifespan on a bound socket."""
    config = uvicorn.Config(
        app,
        http=ClientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_STOP_S,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    ticks = asyncio.create_task(server.main_loop(), name="admin listener")
    try:
        yield
    finally:
        server.should_exit = True
        await ticks
        await server.shutdown(sockets=[listener])
