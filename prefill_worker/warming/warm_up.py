"""Warms an engine: one small request of ours, or the first user waits for everything that is set up lazily."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from engine.client import EngineClient
from engine.errors import EngineError

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
_PROMPT_TOKENS = 4
CACHE_NAMESPACE = "prelude-warm-up|"  # no tenant can be called that: it shares no prefix with users


def warm_up_body(model: str) -> dict[str, Any]:
    """A completion that prefills and decodes; its request id is new."""
    return {
        "model": model,
        "prompt": [1 + secrets.randbelow(16) for _ in range(_PROMPT_TOKENS)],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "rid": f"warm-up-{secrets.token_hex(8)}",
    }


async def warm_engine(engine: EngineClient, model: str) -> None:
    """Return once the engine has answered. Raises EngineError; then it keeps nothing of it."""
    started_at = time.monotonic()
    body = warm_up_body(model)
    try:
        await engine.complete({**body, "extra_key": CACHE_NAMESPACE}, TIMEOUT_S)
    except EngineError:
        await abort(engine, body["rid"])
        raise
    log.info("engine warm", extra={"fields": {"seconds": round(time.monotonic() - started_at, 3)}})


async def abort(engine: EngineClient, rid: str) -> None:
    """Drop a warm-up that failed. An engine that cannot be told has most likely ended."""
    try:
        await engine.abort(rid)
    except EngineError as error:
        log.debug("abort of a warm-up failed", extra={"fields": {"error": str(error)}})
