"""An agent's HTTP endpoints: /metrics and /engine/metrics, /health (it runs) and /ready (the worker takes requests)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NoReturn

from aiohttp import web
from prometheus_client import generate_latest

from cluster.config.workers import ENGINE_METRICS_PATH
from cluster.control.worker import Worker
from engine.errors import EngineError

_MAX_CONNECTIONS = 128  # the oldest makes way for one more
_CONNECTION_S = 30.0  # for a request and its answer; each connection has one
_SWEEP_S = 1.0


@contextlib.asynccontextmanager
async def serve_worker_http(worker: Worker) -> AsyncIterator[None]:
    """Serve on the worker's metrics port."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(worker.registry), content_type="text/plain", charset="utf-8")

    async def engine_metrics(_request: web.Request) -> web.Response:
        try:
            page = await worker.engine_metrics()
        except EngineError as error:
            return web.Response(status=503, text=f"the engine has no metrics now: {error}\n")
        return web.Response(body=page, content_type="text/plain", charset="utf-8")

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "alive", "worker": worker.name})

    async def ready(_request: web.Request) -> web.Response:
        state = worker.hub.state
        ok = state.ready and not state.draining
        body = {"ready": ok, "reason": state.reason, "not_warm_with": list(state.not_warm_with)}
        return web.json_response(body, status=200 if ok else 503)

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get(ENGINE_METRICS_PATH, engine_metrics),
            web.get("/health", health),
            web.get("/ready", ready),
        ]
    )
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

    loop = asyncio.get_running_loop()
    listener = await loop.create_server(accept, worker.worker.host, worker.worker.metrics_port)
    sweep = asyncio.create_task(_abort_old(connections), name="old connections to metrics")
    try:
        yield
    finally:
        sweep.cancel()
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
