"""How long each stage of requests takes in the engines of a system, as SGLang counts it."""

from __future__ import annotations

import re
from collections import defaultdict

import aiohttp

from bench.errors import SystemFailed
from bench.load.options import Endpoint

_HISTOGRAM = "sglang:per_stage_req_latency_seconds"
_LINE = re.compile(rf'^{_HISTOGRAM}_(sum|count)\{{[^}}]*stage="([^"]+)"[^}}]*\}} (\S+)', re.MULTILINE)
_TIMEOUT = aiohttp.ClientTimeout(total=30)

Stages = dict[str, tuple[float, float]]  # by stage: seconds and observations so far


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
        return {name: await _stages_at(session, name, url) for name, url in engines_of(endpoint).items()}


async def _stages_at(session: aiohttp.ClientSession, name: str, url: str) -> Stages:
    try:
        async with session.get(f"{url}/metrics", raise_for_status=True) as answer:
            return stages_in(await answer.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SystemFailed(f"{name} does not show its metrics at {url}/metrics: {error}") from error


def stages_in(page: str) -> Stages:
    """What the histogram has counted by stage, summed over its other labels."""
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for kind, stage, value in _LINE.findall(page):
        (sums if kind == "sum" else counts)[stage] += float(value)
    return {stage: (sums[stage], counts[stage]) for stage in counts}


def means_ms(before: Stages, after: Stages) -> dict[str, float]:
    """The mean time in each stage between the two."""
    found = {}
    for stage, (seconds, observations) in after.items():
        seconds_before, observations_before = before.get(stage, (0.0, 0.0))
        if observations > observations_before:
            found[stage] = round(1000 * (seconds - seconds_before) / (observations - observations_before), 3)
    return found
