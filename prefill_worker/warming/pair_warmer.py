"""Warms up pairs: sends small requests through this prefill engine and a decode engine.

The first KV transfer of a new pair sets up connections, which has taken 20 s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from cluster.control.worker_watch import WorkerWatch
from engine.client import EngineClient
from engine.errors import EngineError
from prefill_worker.warming.warm_up import CACHE_NAMESPACE, TIMEOUT_S, WARM_UP_REQUESTS, abort, warm_up_body

log = logging.getLogger(__name__)


async def warm_pair(
    prefill: EngineClient, kv_host: str, kv_bootstrap_port: int, model: str, decode: WorkerWatch
) -> None:
    """Return once the pair has transferred KV cache. On EngineError the requests are aborted on both engines."""
    assert decode.description is not None
    started_at = time.monotonic()
    description = decode.description
    decode_engine = EngineClient(description.engine_url, key=description.engine_key, tls=decode.engine_tls)
    try:
        for fields in WARM_UP_REQUESTS:
            handoff = {"bootstrap_host": kv_host, "bootstrap_port": kv_bootstrap_port}
            await _send_request(prefill, decode_engine, {**warm_up_body(model, fields), **handoff})
    finally:
        await decode_engine.aclose()
    log.info("pair warm", extra={"fields": {"decode": decode.name, "seconds": round(time.monotonic() - started_at, 3)}})


async def _send_request(prefill: EngineClient, decode: EngineClient, body: dict[str, Any]) -> None:
    body["bootstrap_room"] = secrets.randbits(63)
    calls = [
        asyncio.create_task(prefill.complete({**body, "extra_key": CACHE_NAMESPACE}, TIMEOUT_S), name="prefill call"),
        asyncio.create_task(decode.complete(body, TIMEOUT_S), name="decode call"),
    ]
    try:
        await asyncio.gather(*calls)
    except EngineError:
        for engine in (prefill, decode):
            await abort(engine, body["rid"])
        raise
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
