"""Serves the router's admin pages on a listener of their own, for as long as the router serves clients."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from router.http.client_connection import client_protocol
from router.http.connections import ClientConnections, ConnectionLimits

_MAX_CONNECTIONS = 256  # and requests
_STOP_S = 1  # for requests in flight


@asynccontextmanager
async def serving(app: Any, listener: socket.socket, limits: ConnectionLimits) -> AsyncIterator[None]:
    """Serve an ASGI application without a lifespan on a bound socket."""
    limits = replace(limits, max_connections=min(limits.max_connections, _MAX_CONNECTIONS))
    config = uvicorn.Config(
        app,
        http=client_protocol(ClientConnections(limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
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
        ticks.cancel()
        await server.shutdown(sockets=[listener])
