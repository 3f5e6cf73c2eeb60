"""A large request gets its turn where small ones use up two limits at the same time. In virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from support.routers.callers import caller

from cluster.config.quotas import QuotasConfig
from router.errors import QuotaExceeded
from router.identity.access import Principal
from router.metrics import Metrics
from router.quotas.bucket import Bucket, Gauge
from router.quotas.budget import Use
from router.quotas.quotas import Admission, Quotas

STEP_S = 0.25
ADAPTER = "acme/bot"


ACME = caller("acme", "k" * 12)
OTHER_KEYS = [caller("acme", key * 12) for key in "opq"]
OTHER_TENANTS = [caller(tenant, "x" * 12) for tenant in ("beta", "gamma", "delta")]

# Limits, the large request, the small ones of its own key, and those of others who share the broader limit only.
SMALL = Use(prompt_tokens=50, output_tokens=50, sequences=1)
CASES: dict[str, tuple[dict[str, Any], Use, list[Principal]]] = {
    "a key's and its tenant's tokens": (
        {"default": {"prompt_tokens_per_min": 12_000, "each_key": {"prompt_tokens_per_min": 6_000}}},
        Use(prompt_tokens=4_000, sequences=1),
        [ACME, *OTHER_KEYS],
    ),
    "prompts and answers of one tenant": (
        {"default": {"prompt_tokens_per_min": 6_000, "output_tokens_per_min": 9_000}},
        Use(prompt_tokens=5_000, output_tokens=6_000, sequences=1),
        [ACME, ACME],
    ),
    "tokens and sequences of one tenant": (
        {"default": {"prompt_tokens_per_min": 6_000, "sequences": 16}},
        Use(prompt_tokens=4_000, sequences=12),
        [ACME, ACME],
    ),
    "a key's sequences and its tenant's tokens": (
        {"default": {"prompt_tokens_per_min": 9_000, "each_key": {"sequences": 8}}},
        Use(prompt_tokens=3_000, sequences=8),
        [ACME, ACME, *OTHER_KEYS],
    ),
    "a key's and its tenant's sequences": (
        {"default": {"sequences": 24, "each_key": {"sequences": 16}}},
        Use(sequences=16),
        [ACME, ACME, *OTHER_KEYS],
    ),
    "a tenant's and an adapter's tokens": (
        {"default": {"prompt_tokens_per_min": 6_000}, "adapters": {ADAPTER: {"prompt_tokens_per_min": 9_000}}},
        Use(prompt_tokens=4_000, sequences=1),
        [ACME, *OTHER_TENANTS],
    ),
    "the whole of a key's tokens, and its tenant's": (
        {"default": {"prompt_tokens_per_min": 12_000, "each_key": {"prompt_tokens_per_min": 6_000}}},
        Use(prompt_tokens=6_000, sequences=1),
        [ACME, *OTHER_KEYS],
    ),
}


class Clients:
    def __init__(self, config: dict[str, Any]) -> None:
        self.now = 1000.0
        self.quotas = Quotas(QuotasConfig.model_validate(config), Metrics(), clock=lambda: self.now)
        self._running: list[tuple[float, int, Admission]] = []
        self._num_begun = 0

    def step(self) -> None:
        self.now += STEP_S
        while self._running and self._running[0][0] <= self.now:
            heapq.heappop(self._running)[2].__exit__(None, None, None)

    def asks(self, who: Principal, use: Use, seconds: float) -> float | None:
        """How long it is told to wait; None: it is admitted, and runs so long."""
        self._num_begun += 1
        admission = self.quotas.admission(who).__enter__()
        try:
            admission.take(use, ADAPTER, None)
        except QuotaExceeded as error:
            admission.__exit__(None, None, None)
            return error.retry_after_s or 1.0
        admission.settle(use.prompt_tokens, use.output_tokens)
        heapq.heappush(self._running, (self.now + seconds, self._num_begun, admission))
        return None


@pytest.mark.parametrize("case", CASES)
def test_a_large_request_is_admitted_beside_small_ones_that_use_up_two_limits(case: str):
    config, large, others = CASES[case]
    clients, random = Clients(config), Random(case)
    waited_s, num_large, num_small, next_at, since = list[float](), 0, 0, 1100.0, 1100.0
    for _ in range(3600):
        clients.step()
        for who in others:
            for _ in range(2):  # 400 tokens a second each
                num_small += clients.asks(who, SMALL, random.uniform(1, 3)) is None
        if clients.now >= next_at:
            told_s = clients.asks(ACME, large, 2.0)
            if told_s is None:
                waited_s.append(clients.now - since)
                num_large += 1
                since = clients.now + random.uniform(5, 40)
            next_at = since if told_s is None else clients.now + math.ceil(told_s)
    print(f"{case}: {num_large} large ones after {[round(each) for each in waited_s]} s, {num_small} small ones")
    # Each limit has what is missing within twice its time alone: two minutes for a bucket, and as long for slots.
    assert num_large >= 3
    assert max(waited_s) <= 250
    assert num_small > 500  # who go on: one every two seconds at the least


@pytest.mark.parametrize("seed", range(2))
def test_what_is_held_keeps_every_promise_of_a_bucket(seed: int):
    """Over any time, takes are at most capacity + rate x time, and a twentieth; what is held is there in the end."""
    random = Random(seed)
    bucket, taken = Bucket(10.0, 600.0, 0.0), list[tuple[float, float]]()
    for number in range(1500):
        bucket.refill(number * 0.25)
        for amount in (random.uniform(1, 40), random.choice([random.uniform(50, 700), 5.0])):
            if bucket.wait_s(amount) == 0 and random.random() < 0.8:
                bucket.serve(amount)
                taken.append((bucket.at, min(amount, bucket.capacity)))
        kind, amount = random.random(), random.uniform(50, 700)
        if kind < 0.05 and bucket.wait_s(amount):
            bucket.reserve(amount, bucket.wait_s(amount))
        elif kind < 0.1 and bucket.wait_s(amount) == 0:
            bucket.hold(amount, random.uniform(0, 60))
        assert bucket.level <= bucket.capacity * 1.05 + 1e-6
        assert 0 <= bucket.saved <= bucket.due <= bucket.capacity
        if bucket.due and bucket.saved == bucket.due and bucket.level >= bucket.due:
            assert bucket.wait_s(bucket.due) == 0
    for start in range(0, len(taken), 97):
        total, began_at = 0.0, taken[start][0]
        for at, amount in taken[start:]:
            total += amount
            assert total <= 1.05 * bucket.capacity + bucket.capacity + bucket.rate * (at - began_at) + 1e-6


@pytest.mark.parametrize("hold", [Bucket.hold, None])
def test_others_have_all_that_is_added_beside_what_is_held(hold: Callable[..., None] | None):
    bucket = Bucket(100.0, 6000.0, 0.0)
    num_small = 0
    for number in range(600):
        bucket.refill(number * 0.1)
        if hold is not None and number % 40 == 0:
            hold(bucket, 6000, 0.0)
        while bucket.wait_s(20) == 0:
            bucket.serve(20)
            num_small += 1
    assert num_small * 20 == pytest.approx(6000 * (hold is None) + 6000, rel=0.06)
    assert (bucket.wait_s(6000) == 0) == (hold is not None)


def test_slots_that_are_held_in_vain_are_for_others_as_long():
    gauge, held_s = Gauge(4), 0.0
    for number in range(4800):
        now = number * 0.1
        gauge.refill(now)
        gauge.hold(4, 0.0, now)
        held_s += 0.0 if gauge.can_take(1) else 0.1
    assert held_s == pytest.approx(240, rel=0.05)
