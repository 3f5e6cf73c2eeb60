"""The requests of a simulation: Poisson arrivals, adapters by a Zipf law, bursts of hot adapters."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True)
class Bursts:
    """Every `period_s`, one random adapter gets `share` of the requests for `length_s`."""

    period_s: float = 10.0
    length_s: float = 5.0
    share: float = 0.2


@dataclass(frozen=True)
class Workload:
    """What clients send."""

    duration_s: float = 60.0
    requests_per_s: float = 700.0
    num_adapters: int = 10_000
    zipf: float = 1.0
    bursts: Bursts | None = None
    mean_prompt_tokens: int = 500
    sigma_prompt_tokens: float = 0.7  # of the lognormal distribution
    mean_decode_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    adapter: int
    prompt_tokens: int
    decode_s: float


def arrivals(workload: Workload, seed: int) -> Iterator[Arrival]:
    """All requests in order. Equal seeds give equal requests."""
    random = Random(seed)
    shares = list(accumulate((rank + 1) ** -workload.zipf for rank in range(workload.num_adapters)))
    popularity = list(range(workload.num_adapters))
    random.shuffle(popularity)
    median_tokens = workload.mean_prompt_tokens / math.exp(workload.sigma_prompt_tokens**2 / 2)
    bursts, hot, burst_ends_s, next_burst_s = workload.bursts, 0, 0.0, 5.0
    now = 0.0
    while (now := now + random.expovariate(workload.requests_per_s)) < workload.duration_s:
        adapter = popularity[bisect(shares, random.random() * shares[-1])]
        if bursts is not None:
            if now >= next_burst_s:
                hot = random.randrange(workload.num_adapters)
                burst_ends_s, next_burst_s = now + bursts.length_s, next_burst_s + bursts.period_s
            if now < burst_ends_s and random.random() < bursts.share:
                adapter = hot
        tokens = 1 + int(median_tokens * math.exp(random.gauss(0, workload.sigma_prompt_tokens)))
        yield Arrival(now, adapter, tokens, random.expovariate(1 / workload.mean_decode_s))
