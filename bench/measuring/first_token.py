"""The time to the first token of one streamed request."""

from __future__ import annotations

import time
from typing import Any

import aiohttp

from bench.errors import SystemFailed


async def first_token_s(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Send a completion and read its whole stream; returns the seconds to its first event. Raises SystemFailed."""
    began_at, first_s, is_done = time.perf_counter(), None, False
    adapter = body.get("adapter", "the base model")
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status != 200:
            raise SystemFailed(f"the router answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b'data: {"error"'):
                raise SystemFailed(f"a stream of {adapter} failed: {line.decode()[:500]}")
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began_at
            is_done = is_done or line.startswith(b"data: [DONE]")
    if first_s is None or not is_done:
        raise SystemFailed(f"a stream of {adapter} ended before its end")
    return first_s
