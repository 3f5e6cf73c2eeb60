"""Waiting for a turn, in virtual time: bounds, deadlines, clients that leave, and fairness."""

import asyncio
from random import Random
from typing import Any

import pytest
from support.routers.fleets import DECODES, PREFILLS, UNIFIED
from support.routers.virtual_time import VIRTUAL, Clock, run_in_virtual_time

from bench.load.summary import quantile
from cluster.config.quotas import FairQueueConfig, QuotasConfig
from router.errors import QueuedTooLong, QueueFull
from router.fleet.capacity import has_capacity
from router.fleet.fleet_state import FleetState, Holders, WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.metrics import Metrics
from router.quotas.admission_queue import AdmissionQueue, Turn

LOOP = VIRTUAL


class Capacity:
    """So many requests at a time."""

    def __init__(self, most: int = 1) -> None:
        self.most, self.used = most, 0

    def __call__(self, _tokens: float, sequences: float) -> bool:
        return self.used + sequences < self.most


def turns_of(capacity: Any, **queue: Any) -> AdmissionQueue:
    config = QuotasConfig(fair_queue=FairQueueConfig(**queue))
    return AdmissionQueue(config, config.fair_queue, capacity, Metrics())


def take(turns: AdmissionQueue, tenant: str = "acme") -> asyncio.Task[Turn]:
    asked = turns.take(tenant, prompt_tokens=100, output_tokens=0, num_sequences=1)
    return asyncio.create_task(asked)


async def passed() -> None:
    """Let all tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_nobody_waits_while_there_is_capacity():
    turns = turns_of(Capacity(2))
    one = await take(turns)
    two = await take(turns)
    assert (one.granted, two.granted, turns.num_waiting) == (None, None, 0)
    third = take(turns)
    await passed()
    assert (third.done(), turns.num_waiting) == (False, 1)
    one.end()
    await passed()
    assert third.done()


async def test_what_is_on_its_way_counts_until_it_is_placed():
    capacity = Capacity(1)
    turns = turns_of(capacity)
    one = await take(turns)
    waiting = take(turns)
    await passed()
    assert not waiting.done()
    capacity.used = 1  # now it counts at a worker
    one.placed()
    one.placed()  # a second attempt
    await passed()
    assert not waiting.done()
    capacity.used = 0
    turns.look()
    await passed()
    assert waiting.done()


async def test_a_turn_that_does_not_come_in_time_is_an_error():
    turns = turns_of(lambda *_: False, timeout_s=5)
    began_at = asyncio.get_running_loop().time()
    with pytest.raises(QueuedTooLong, match="not begun within 5 s"):
        await take(turns)
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(5, abs=0.1)
    assert turns.num_waiting == turns.tokens_waiting == 0


async def test_a_client_that_leaves_with_its_turn_gives_it_back():
    capacity = Capacity(1)
    turns = turns_of(capacity)
    one = await take(turns)
    leaving, staying = take(turns), take(turns, "beta")
    await passed()
    one.end()
    leaving.cancel()  # its turn has come, and it does not know yet
    await passed()
    assert staying.done()
    assert turns.num_waiting == turns.tokens_waiting == 0


async def test_the_fleet_is_looked_at_again_without_an_event():
    capacity = Capacity(0)
    turns = turns_of(capacity)
    waiting = take(turns)
    await asyncio.sleep(1)
    capacity.most = 1
    await asyncio.sleep(0.1)
    assert waiting.done()


# ---- which fleet has capacity ---------------------------------------------------------------------------------------


def fleet_has_capacity(*workers: WorkerView, tokens: dict[str, int] | None = None, **options: Any) -> bool:
    loads = WorkerLoads(lambda: 0.0)
    for name, prompt_tokens in (tokens or {}).items():
        loads.add(name, prompt_tokens=prompt_tokens)
    fleet = FleetState({worker.name: worker for worker in workers}, loads, Holders())
    asked = {"queue_s": 0.1, "worker_sequences": 2, "coming_tokens": 0.0, "coming_sequences": 0.0, **options}
    return has_capacity(fleet, 0.0, **asked)


PREFILL, DECODE = PREFILLS[0], DECODES[0]


@pytest.mark.parametrize(
    ("workers", "options", "expected"),
    [
        ((), {}, True),  # the request shall learn that there is no worker
        (UNIFIED, {"tokens": {"u0": 400, "u1": 1000}}, True),  # 5000 tokens/s: 0.08 s and 0.2 s
        (UNIFIED, {"tokens": {"u0": 600, "u1": 1000}}, False),
        (UNIFIED, {"coming_tokens": 501.0}, False),  # they may fill both
        (UNIFIED, {"coming_tokens": 500.0}, True),
        (UNIFIED, {"coming_tokens": 500.0, "tokens": {"u1": 1000}}, False),
        (UNIFIED[:1], {"tokens": {"u0": 1}, "worker_sequences": 1}, False),
        (UNIFIED, {"coming_sequences": 4.0}, False),
        ((PREFILL, DECODE), {"tokens": {"p0": 600}}, False),
        ((PREFILL, DECODE), {"tokens": {"d0": 0}, "worker_sequences": 1}, False),
        ((PREFILL, DECODE, *UNIFIED), {"tokens": {"d0": 0}, "worker_sequences": 1}, True),
        ((PREFILL,), {}, True),  # its error is for placement to say
    ],
)
def test_which_fleet_has_capacity(workers: tuple[WorkerView, ...], options: dict[str, Any], expected: bool):
    assert fleet_has_capacity(*workers, **options) is expected


@pytest.mark.parametrize(
    ("prompts", "num_at_engine", "expected"),
    [
        ([600], 1, [False, True, True]),  # 0.12 s, of which 0.09 s are left after 0.03 s
        ([600], 0, [False, False, False]),  # its adapter is loaded
        ([600, 600], 2, [False, False, False]),  # one at a time, however long it takes
        ([600, 600], 1, [False, False, False]),
        ([400, 600], 2, [False, False, False]),
        ([150, 400], 2, [False, True, True]),
    ],
)
def test_the_next_prompt_comes_shortly_before_a_worker_has_read_its_last(
    prompts: list[int], num_at_engine: int, expected: list[bool]
):
    clock = Clock(0.0)
    loads = WorkerLoads(clock)
    fleet = FleetState({"u0": UNIFIED[0]}, loads, Holders())
    for number, tokens in enumerate(prompts):
        prompt = loads.add("u0", prompt_tokens=tokens)
        if number < num_at_engine:
            prompt.read_begins()
    found = []
    for clock.now in (0.0, 0.03, 1.0):
        limits = {"worker_sequences": 9, "coming_tokens": 0.0, "coming_sequences": 0.0}
        found.append(has_capacity(fleet, clock.now, queue_s=0.1, **limits))
    assert found == expected


# ---- one tenant with 100 times the load of another ------------------------------------------------------------------

NUM_WORKERS = 8
TOKENS_PER_S = 5000.0
PROMPT_TOKENS = range(250, 751)
CAPACITY = NUM_WORKERS * TOKENS_PER_S / 500  # requests/s
SECONDS = 30.0


class Fleet:
    """Workers that read one prompt at a time, for who has a turn."""

    def __init__(self) -> None:
        self._capacity = Capacity(NUM_WORKERS)
        self._turns = turns_of(self._capacity, timeout_s=10, max_requests=20)
        self.first_s: dict[str, list[float]] = {}

    async def request(self, tenant: str, tokens: int) -> None:
        began_at = asyncio.get_running_loop().time()
        try:
            turn = await self._turns.take(tenant, prompt_tokens=tokens, output_tokens=0, num_sequences=1)
        except (QueueFull, QueuedTooLong):
            return
        with turn:
            self._capacity.used += 1
            turn.placed()
            await asyncio.sleep(tokens / TOKENS_PER_S)
            self._capacity.used -= 1
            self._turns.look()
        self.first_s.setdefault(tenant, []).append(asyncio.get_running_loop().time() - began_at)


async def load(fleet: Fleet, tenant: str, per_s: float, seconds: float, seed: int) -> None:
    """Poisson arrivals."""
    random = Random(seed)
    async with asyncio.TaskGroup() as group:
        left_s = seconds
        while (gap_s := random.expovariate(per_s)) < left_s:
            left_s -= gap_s
            await asyncio.sleep(gap_s)
            group.create_task(fleet.request(tenant, random.choice(PROMPT_TOKENS)))


async def measured(*, with_neighbour: bool) -> Fleet:
    fleet, small = Fleet(), CAPACITY / 50
    async with asyncio.TaskGroup() as group:
        group.create_task(load(fleet, "small", small, SECONDS, seed=1))
        if with_neighbour:
            group.create_task(load(fleet, "large", 100 * small, SECONDS, seed=2))
    return fleet


@pytest.mark.slow
def test_a_tenant_with_100_times_the_load_slows_the_other_down_by_half_at_most():
    """At twice the fleet's capacity."""
    alone, beside = (run_in_virtual_time(measured(with_neighbour=each)) for each in (False, True))
    assert quantile(beside.first_s["small"], 0.95) <= 1.5 * quantile(alone.first_s["small"], 0.95)
    # The fleet stays busy: waiting for turns costs no throughput.
    assert len(beside.first_s["large"]) + len(beside.first_s["small"]) > 0.95 * SECONDS * CAPACITY
