"""Warms pairs: one small request through this prefill engine and a decode engine before any user's.

The first exchange between a fresh pair sets up connections, which has taken 20 s; users must not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from cluster.control.worker_watch import WorkerWatch
from engine.client import EngineClient
from engine.errors import EngineError
from prefill_worker.warming.warm_up import CACHE_NAMESPACE, TIMEOUT_S, abort, warm_up_body

log = logging.getLogger(__name__)

_NUM_EXCHANGES = 2  # the second one finds every lazy set-up done


async def warm_pair(
    prefill: EngineClient, kv_host: str, kv_bootstrap_port: int, model: str, decode: WorkerWatch
) -> None:
    """Return once the pair has moved KV. Raises EngineError; then neither engine keeps anything of it."""
    assert decode.description is not None
    started_at = time.monotonic()
    decode_engine = EngineClient(decode.description.engine_url)
    try:
        for _ in range(_NUM_EXCHANGES):
            await _exchange(prefill, decode_engine, kv_host, kv_bootstrap_port, model)
    finally:
        await decode_engine.aclose()
    log.info("pair warm", extra={"fields": {"decode": decode.name, "seconds": round(time.monotonic() - started_at, 3)}})


async def _exchange(prefill: EngineClient, decode: EngineClient, kv_host: str, port: int, model: str) -> None:
    meeting = {"bootstrap_host": kv_host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(63)}
    body = {**warm_up_body(model), **meeting}
    legs = [
        asyncio.create_task(prefill.complete({**body, "extra_key": CACHE_NAMESPACE}, TIMEOUT_S), name="prefill leg"),
        asyncio.create_task(decode.complete(body, TIMEOUT_S), name="decode leg"),
    ]
    try:
        await asyncio.gather(*legs)
    except EngineError:
        for engine in (prefill, decode):
            await abort(engine, body["rid"])
        raise
    finally:
        for leg in legs:
            leg.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
