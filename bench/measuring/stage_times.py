"""Mean times of stages, from two pages of a histogram in Prometheus' text format."""

from __future__ import annotations

import re
from collections import defaultdict

import aiohttp

from bench.errors import SystemFailed

SGLANG_STAGES = "sglang:per_stage_req_latency_seconds"  # a histogram of the stages of an engine's requests

Stages = dict[str, tuple[float, float]]  # by stage: seconds and observations so far


async def stages_at(
    session: aiohttp.ClientSession, name: str, url: str, histogram: str, label: str = "stage"
) -> Stages:
    """What the engine or worker of this name has counted so far, by its metrics page. Raises SystemFailed."""
    try:
        async with session.get(url, raise_for_status=True) as answer:
            return stages_in(await answer.text(), histogram, label)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SystemFailed(f"{name} does not show its metrics at {url}: {error}") from error


def stages_in(page: str, histogram: str, label: str = "stage") -> Stages:
    """What a histogram has counted by the values of this label, summed over its other labels."""
    line = re.compile(rf'^{re.escape(histogram)}_(sum|count)\{{[^}}]*{label}="([^"]+)"[^}}]*\}} (\S+)', re.MULTILINE)
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for kind, stage, value in line.findall(page):
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
