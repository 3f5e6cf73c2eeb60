"""Warms up an engine with a small request, so that no user waits for its lazy initialization."""

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
CACHE_NAMESPACE = "prelude-warm-up|"  # not a valid tenant name, so no prefix is shared with users


def warm_up_body(model: str) -> dict[str, Any]:
    """Body of a small completion with a new request id."""
    return {
        "model": model,
        "prompt": [1 + secrets.randbelow(16) for _ in range(_PROMPT_TOKENS)],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "rid": f"warm-up-{secrets.token_hex(8)}",
    }


async def warm_engine(engine: EngineClient, model: str) -> None:
    """Return once the engine has answered. On EngineError the request is aborted."""
    started_at = time.monotonic()
    body = warm_up_body(model)
    try:
        await engine.complete({**body, "extra_key": CACHE_NAMESPACE}, TIMEOUT_S)
    except EngineError:
        await abort(engine, body["rid"])
        raise
    log.info("engine warm", extra={"fields": {"seconds": round(time.monotonic() - started_at, 3)}})


async def abort(engine: EngineClient, rid: str) -> None:
    """Abort a failed warm-up. An engine that is unreachable has most likely ended."""
    try:
        await engine.abort(rid)
    except EngineError as error:
        log.debug("warm-up abort failed", extra={"fields": {"error": str(error)}})
