"""The time to the first token of one streamed request, for benchmarks that stop at the first failure."""

from __future__ import annotations

import time
from typing import Any

import aiohttp

from bench.errors import SystemFailed
from bench.load.events import EventStream, MalformedStream


async def first_token_s(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Send a completion and read its whole stream; returns the seconds to its first token. Raises SystemFailed."""
    stream, began_at = EventStream(), time.perf_counter()
    adapter = body.get("adapter", "the base model")
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status != 200:
            raise SystemFailed(f"the router answered {answer.status}: {(await answer.text())[:500]}")
        async for data in answer.content.iter_any():
            try:
                stream.feed(data, time.perf_counter() - began_at)
            except MalformedStream as error:
                raise SystemFailed(f"a stream of {adapter} is malformed: {error}") from error
            if stream.error is not None:
                raise SystemFailed(f"a stream of {adapter} failed: {stream.error}")
    if not stream.token_s or not stream.is_done:
        raise SystemFailed(f"a stream of {adapter} ended before its end")
    return stream.token_s[0]
