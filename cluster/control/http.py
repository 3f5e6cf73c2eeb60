"""An agent's HTTP endpoints: /metrics and /engine/metrics, /health (it runs) and /ready (the worker takes requests)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client import generate_latest

from cluster.control.worker import Worker
from engine.errors import EngineError

ENGINE_METRICS_PATH = "/engine/metrics"


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
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, worker.worker.host, worker.worker.metrics_port).start()
    try:
        yield
    finally:
        await runner.cleanup()
