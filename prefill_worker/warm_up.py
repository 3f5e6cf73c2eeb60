"""Warms up an engine, or a pair, with small requests, so that no user waits for what is made at first use.

The first KV transfer of a new pair sets up connections, which has taken 20 s.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from cluster.agent.peers import Peer
from cluster.config.workers import NOBODY
from engine.client import EngineClient
from engine.errors import EngineError

log = logging.getLogger(__name__)

TRY_S = 60.0
# The first request of engines that were used. A decode engine that knows an earlier prefill engine of this address, one
# that was killed, waits for that one, and asks for the new one after a failure.
FIRST_TRY_S = 10.0
_PROMPT_TOKENS = 4
CACHE_NAMESPACE = "prelude-warm-up|"  # not a valid tenant name, so no prefix is shared with users
# Together they run every sampler, penalty and kind of output once: GPU kernels are compiled and loaded at first use.
WARM_UP_REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "logprobs": 2},
    {"temperature": 1, "top_p": 0.9, "top_k": 20, "regex": "[a-z ]*"},
    {
        "temperature": 1,
        "top_p": 0.9,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "logit_bias": {"1": 1},
    },
)


def _warm_up_body(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Body of a small completion with a new request id and these fields."""
    return {
        "model": model,
        "prompt": [1 + secrets.randbelow(16) for _ in range(_PROMPT_TOKENS)],
        "max_tokens": 2,
        "ignore_eos": True,
        **fields,
        "rid": f"warm-up-{secrets.token_hex(8)}",
    }


def to_nobody() -> dict[str, Any]:
    """The handoff of a prefill engine's request that no decode engine takes part in."""
    return {"bootstrap_host": NOBODY, "bootstrap_room": secrets.randbits(63)}


async def warm_engine(engine: EngineClient, model: str, handoff: Callable[[], dict[str, Any]] = dict) -> None:
    """Return once the engine has answered each kind of request. On EngineError the request is aborted.

    `handoff`: of each request, `to_nobody` for a prefill engine.
    """
    started_at = time.monotonic()
    for fields in WARM_UP_REQUESTS:
        body = _warm_up_body(model, fields)
        try:
            await engine.complete({**body, **handoff(), "extra_key": CACHE_NAMESPACE}, TRY_S)
        except EngineError:
            await _abort(engine, body["rid"])
            raise
    log.info("engine warm", extra={"fields": {"seconds": round(time.monotonic() - started_at, 3)}})


async def warm_pair(
    prefill: EngineClient,
    kv_host: str,
    kv_bootstrap_port: int,
    model: str,
    decode: Peer,
    *,
    were_used: bool,
    within_s: float = TRY_S,
) -> None:
    """Return once the pair has transferred KV cache. On EngineError the requests are aborted on both engines.

    `were_used`: both engines have answered each kind of request, so only the connections between them are new. One
    request sets those up. It waits behind all others at the decode engine, which may be full.
    """
    assert decode.description is not None
    started_at = time.monotonic()
    description = decode.description
    client = EngineClient(description.engine_url, key=description.engine_key, tls=decode.engine_tls)
    async with aclosing(client) as decode_engine:
        for fields in WARM_UP_REQUESTS[:1] if were_used else WARM_UP_REQUESTS:
            handoff = {"bootstrap_host": kv_host, "bootstrap_port": kv_bootstrap_port}
            await _send_request(prefill, decode_engine, {**_warm_up_body(model, fields), **handoff}, within_s)
    log.info("pair warm", extra={"fields": {"decode": decode.name, "seconds": round(time.monotonic() - started_at, 3)}})


async def _send_request(prefill: EngineClient, decode: EngineClient, body: dict[str, Any], within_s: float) -> None:
    body["bootstrap_room"] = secrets.randbits(63)
    calls = [
        asyncio.create_task(prefill.complete({**body, "extra_key": CACHE_NAMESPACE}, within_s), name="prefill call"),
        asyncio.create_task(decode.complete(body, within_s), name="decode call"),
    ]
    try:
        await asyncio.gather(*calls)
    except EngineError:
        for engine in (prefill, decode):
            await _abort(engine, body["rid"])
        raise
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _abort(engine: EngineClient, rid: str) -> None:
    """Abort a failed warm-up. An engine that is unreachable has most likely ended."""
    try:
        await engine.abort(rid)
    except EngineError as error:
        log.debug("warm-up abort failed", extra={"fields": {"error": str(error)}})
