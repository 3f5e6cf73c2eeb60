"""An agent's HTTP endpoints: /metrics and /engine/metrics, /health (it runs) and /ready (the worker takes requests)."""

from contextlib import AbstractAsyncContextManager

from aiohttp import web

from cluster.config.workers import ENGINE_METRICS_PATH
from cluster.control.worker import Worker
from engine.errors import EngineError
from process.status_pages import serving_status


def serve_worker_http(worker: Worker) -> AbstractAsyncContextManager[None]:
    """Serve on the worker's metrics port."""

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

    pages = {ENGINE_METRICS_PATH: engine_metrics, "/health": health, "/ready": ready}
    return serving_status(worker.registry, pages, worker.worker.host, worker.worker.metrics_port)
