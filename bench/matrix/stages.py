"""How long each stage of requests takes in the engines of a system, as SGLang counts it."""

from __future__ import annotations

import aiohttp

from bench.load.options import Endpoint
from bench.measuring.stage_times import SGLANG_STAGES, Stages, stages_at

_TIMEOUT = aiohttp.ClientTimeout(total=30)


def engines_of(endpoint: Endpoint) -> dict[str, str]:
    """URLs by name; none where a whole cluster is called, whose engines are its own."""
    found = {}
    for number, engine in enumerate(endpoint.engines):
        if engine.prefill is None:
            found[f"engine-{number}"] = engine.url
        else:
            found |= {f"prefill-{number}": engine.prefill.url, f"decode-{number}": engine.url}
    return found


async def stages_of(endpoint: Endpoint) -> dict[str, Stages]:
    """By engine, what it has counted so far. Raises SystemFailed."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        return {
            name: await stages_at(session, name, f"{url}/metrics", SGLANG_STAGES)
            for name, url in engines_of(endpoint).items()
        }
