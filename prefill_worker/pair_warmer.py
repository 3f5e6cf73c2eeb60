"""Warms pairs: one small request through this prefill engine and a decode engine before any user's.

The first exchange between a fresh pair sets up connections, which has taken 20 s; users must not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from cluster.worker_watch import WorkerWatch
from engine.client import EngineClient
from engine.errors import EngineError

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
_NUM_EXCHANGES = 2  # the second one finds every lazy set-up done
_PROMPT_TOKENS = 4
CACHE_NAMESPACE = "prelude-warm-up|"  # no tenant can be called that: it shares no prefix with users


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
    room = secrets.randbits(63)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [1 + secrets.randbelow(16) for _ in range(_PROMPT_TOKENS)],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "bootstrap_host": kv_host,
        "bootstrap_port": port,
        "bootstrap_room": room,
        "rid": f"warm-up-{room:x}",
    }
    legs = [
        asyncio.create_task(prefill.complete({**body, "extra_key": CACHE_NAMESPACE}, _TIMEOUT_S), name="prefill leg"),
        asyncio.create_task(decode.complete(body, _TIMEOUT_S), name="decode leg"),
    ]
    try:
        await asyncio.gather(*legs)
    except EngineError:
        for engine in (prefill, decode):
            try:
                await engine.abort(body["rid"])
            except EngineError as error:
                log.debug("abort of a warm-up failed", extra={"fields": {"error": str(error)}})
        raise
    finally:
        for leg in legs:
            leg.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
