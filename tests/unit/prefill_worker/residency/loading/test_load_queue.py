"""The load queue, in virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.routers.virtual_time import VIRTUAL

from adapters.errors import AdapterMalformed
from adapters.store import StoreUnavailable
from prefill_worker.residency.errors import LoadQueueFull
from prefill_worker.residency.loading.load_queue import LoadQueue
from prefill_worker.residency.loading.turns import Load

LOOP = VIRTUAL


class Loader:
    """Takes `load_s`, then raises the key's entry in `outcomes`, if any."""

    def __init__(self) -> None:
        self.load_s = 1.0
        self.outcomes: dict[str, Exception] = {}
        self.started: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.running: Counter[str] = Counter()
        self.most_running = 0

    async def __call__(self, load: Load) -> None:
        self.started.append(load.key)
        self.running[load.key] += 1
        assert self.running[load.key] == 1
        self.most_running = max(self.most_running, self.running.total())
        result = "cancelled"
        try:
            await asyncio.sleep(self.load_s)
            result = "failed"
            if load.key in self.outcomes:
                raise self.outcomes[load.key]
            result = "ok"
        finally:
            self.ended.append((load.key, result))
            self.running[load.key] -= 1


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def loading(parallel: int = 2, queued: int = 4) -> AsyncIterator[tuple[LoadQueue, Loader]]:
    loader = Loader()
    queue = LoadQueue(loader, parallel=parallel, queued=queued, seed=1)
    yield queue, loader
    await asyncio.sleep(0.001)  # abandoned loads end
    assert (queue.num_running, queue.num_queued, queue.num_waiters, queue.keys) == (0, 0, 0, [])
    assert not any(queue._turns._lines)
    await queue.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_one_load_for_all_who_wait_and_a_few_at_once_in_order_of_arrival():
    async with loading() as (queue, loader):
        await asyncio.gather(*(queue.wait(key, 5) for key in "abcdef" * 20))
        assert now() == 3.0
    assert loader.started == list("abcdef")
    assert loader.most_running == 2


async def test_a_full_queue_answers_with_retry_after():
    async with loading() as (queue, loader):
        loader.load_s = 4.0
        waiting = [asyncio.create_task(queue.wait(key, 50)) for key in "abcdef"]
        await asyncio.sleep(0.1)
        with pytest.raises(LoadQueueFull, match=r"6 adapters are being loaded .* try again in 3\.0 s") as first:
            await queue.wait("g", 5)
        assert first.value.retry_after_s == 3.0  # from the initial mean
        joined = asyncio.create_task(queue.wait("f", 50))  # shares the load
        await asyncio.gather(*waiting, joined)
        waiting = [asyncio.create_task(queue.wait(key, 50)) for key in "abcdef"]
        await asyncio.sleep(0.1)
        with pytest.raises(LoadQueueFull) as second:
            await queue.wait("g", 5)
        assert 3.0 < second.value.retry_after_s <= 12.0  # loads took longer than the initial mean
        await asyncio.gather(*waiting)
    assert "g" not in loader.started


async def test_requests_come_before_prewarms():
    async with loading(parallel=1) as (queue, loader):
        tasks = [asyncio.create_task(queue.wait("running", 9))]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(queue.wait(key, 9, is_prewarm=True)) for key in ("warm1", "warm2", "both")]
        tasks += [asyncio.create_task(queue.wait(key, 9)) for key in ("request", "both")]
        await asyncio.gather(*tasks)
    assert loader.started == ["running", "both", "request", "warm1", "warm2"]


async def test_a_request_displaces_the_latest_prewarm():
    async with loading(parallel=1, queued=2) as (queue, loader):
        prewarms = [asyncio.create_task(queue.wait(key, 9, is_prewarm=True)) for key in ("w1", "w2", "w3")]
        await asyncio.sleep(0)
        request = asyncio.create_task(queue.wait("request", 9))
        with pytest.raises(LoadQueueFull):
            await prewarms[2]
        with pytest.raises(LoadQueueFull):
            await queue.wait("w4", 9, is_prewarm=True)
        await asyncio.gather(request, *prewarms[:2])
    assert loader.started == ["w1", "request", "w2"]


async def test_tenants_take_turns():
    async with loading(parallel=1, queued=9) as (queue, loader):
        many = [asyncio.create_task(queue.wait(f"many{n}", 99, tenant="many")) for n in range(6)]
        await asyncio.sleep(0.1)
        few = [asyncio.create_task(queue.wait(key, 99, tenant=key[:3])) for key in ("one1", "one2", "two1")]
        await asyncio.gather(*many, *few)
    assert loader.started == ["many0", "many1", "one1", "two1", "many2", "one2", "many3", "many4", "many5"]


async def test_a_shared_load_starts_in_the_first_turn_of_those_who_wait():
    async with loading(parallel=1, queued=9) as (queue, loader):
        tasks = [asyncio.create_task(queue.wait(key, 99, tenant="many")) for key in ("m0", "m1", "m2", "shared", "m3")]
        await asyncio.sleep(0.1)
        tasks += [asyncio.create_task(queue.wait(key, 99, tenant="one")) for key in ("shared", "last")]
        gone = asyncio.create_task(queue.wait("m3", 99, tenant="gone"))
        await asyncio.sleep(0.1)
        gone.cancel()  # its turn goes with it
        await asyncio.gather(*tasks)
    assert loader.started == ["m0", "m1", "shared", "m2", "last", "m3"]


async def test_a_retried_load_keeps_its_place_among_its_tenants_own():
    async with loading(parallel=1, queued=9) as (queue, loader):
        loader.outcomes["a0"] = StoreUnavailable("away")
        tasks = [asyncio.create_task(queue.wait(key, 99, tenant=key[0])) for key in ("a0", "a1", "a2", "b1", "b2")]
        await asyncio.sleep(1.5)
        loader.outcomes.clear()
        await asyncio.gather(*tasks)
    assert loader.started == ["a0", "a1", "b1", "a0", "b2", "a2"]


async def test_a_full_queue_has_room_for_tenants_with_shorter_lines():
    async with loading(parallel=1, queued=3) as (queue, loader):
        many = [asyncio.create_task(queue.wait(f"many{n}", 99, tenant="many")) for n in range(4)]
        await asyncio.sleep(0.1)
        with pytest.raises(LoadQueueFull):
            await queue.wait("many4", 99, tenant="many")
        shared = asyncio.create_task(queue.wait("many3", 99, tenant="other"))
        await asyncio.sleep(0.1)
        one = asyncio.create_task(queue.wait("one1", 99, tenant="one"))
        with pytest.raises(LoadQueueFull):
            await many[2]  # not many3, which the other tenant waits for, too
        with pytest.raises(LoadQueueFull):
            await queue.wait("one2", 99, tenant="one")  # the longest line is no longer by two
        with pytest.raises(LoadQueueFull):
            await queue.wait("prewarm", 99, tenant="third", is_prewarm=True)
        await asyncio.gather(many[0], many[1], many[3], shared, one)
    assert loader.started == ["many0", "many1", "many3", "one1"]


async def test_deadlines():
    async with loading() as (queue, loader):
        patient = asyncio.create_task(queue.wait("a", 5))
        with pytest.raises(TimeoutError):
            await queue.wait("a", 0.5)
        assert now() == 0.5
        await patient
        with pytest.raises(TimeoutError):
            await queue.wait("b", 0.25)
        assert now() == 1.25
    assert loader.ended == [("a", "ok"), ("b", "cancelled")]


async def test_a_waiter_that_arrives_while_a_load_is_abandoned_gets_a_new_one():
    async with loading() as (queue, loader):

        async def slow_to_end(load: Load) -> None:
            try:
                await loader(load)
            except asyncio.CancelledError:
                await asyncio.sleep(2)
                raise

        queue._load = slow_to_end
        with pytest.raises(TimeoutError):
            await queue.wait("a", 0.5)
        assert queue.keys == ["a"]
        with pytest.raises(TimeoutError):
            await queue.wait("a", 0.5)
        await queue.wait("a", 5)
        assert now() == 0.5 + 2 + 1
    assert loader.started == ["a", "a"]


async def test_transient_errors_are_retried_until_the_deadlines():
    async with loading() as (queue, loader):
        loader.load_s = 0.1
        loader.outcomes["a"] = StoreUnavailable("away")
        short, long, longer = (asyncio.create_task(queue.wait("a", s)) for s in (0.15, 3, 20))
        with pytest.raises(StoreUnavailable, match="away"):
            await short
        assert now() == 0.1  # its deadline did not permit a retry
        with pytest.raises(StoreUnavailable, match="away"):
            await long
        assert 1 < now() <= 3
        loader.outcomes.clear()
        await longer
        assert now() < 6
    assert 4 <= len(loader.started) <= 8


async def test_other_loads_run_during_a_retry_pause():
    async with loading(parallel=1) as (queue, loader):
        loader.outcomes["a"] = StoreUnavailable("away")
        failing = asyncio.create_task(queue.wait("a", 60))
        await asyncio.sleep(0.1)
        await queue.wait("b", 2.5)
        failing.cancel()
        await asyncio.wait([failing])


async def test_a_permanent_error_reaches_every_waiter_at_once():
    async with loading() as (queue, loader):
        loader.outcomes["a"] = AdapterMalformed("odd")
        errors = await asyncio.gather(*(queue.wait("a", 5) for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in errors] == ["odd"] * 3
        assert len(set(map(id, errors))) == 3
    assert loader.started == ["a"]


async def test_closing_ends_everything():
    async with loading(parallel=1) as (queue, loader):
        waiting = [asyncio.create_task(queue.wait(key, 50)) for key in "abc"]
        await asyncio.sleep(0.1)
        await queue.aclose()
        assert [type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)] == [LoadQueueFull] * 3
        with pytest.raises(LoadQueueFull, match="stopping"):
            await queue.wait("d", 5)
    assert loader.ended == [("a", "cancelled")]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.slow
async def test_random_requests_keep_the_bounds(seed: int):
    """One load per key, bounded concurrency and queue, and an answer to every waiter within its deadline."""
    chance = random.Random(seed)
    parallel, queued = chance.randint(1, 4), chance.randint(1, 6)
    answers: Counter[str] = Counter()
    async with loading(parallel, queued) as (queue, loader):

        async def load(each: Load) -> None:
            assert queue.num_running <= parallel
            assert len(queue.keys) <= parallel + queued
            assert each.waiters
            loader.load_s = chance.choice([0.0, 0.1, 1.0, 5.0])
            loader.outcomes.pop(each.key, None)
            if chance.random() < 0.3:
                loader.outcomes[each.key] = chance.choice([StoreUnavailable("away"), AdapterMalformed("odd")])
            await loader(each)

        queue._load = load

        async def request() -> None:
            await asyncio.sleep(chance.uniform(0, 20))
            key, deadline_s = chance.choice("abcdefghijklmnop"), chance.choice([0.0, 0.5, 3.0, 15.0])
            begun = now()
            try:
                await queue.wait(key, deadline_s, is_prewarm=chance.random() < 0.3, tenant=chance.choice("xyz"))
            except (LoadQueueFull, AdapterMalformed, StoreUnavailable, TimeoutError) as error:
                answers[type(error).__name__] += 1
            else:
                answers["ok"] += 1
            assert now() <= begun + deadline_s + 1e-6

        requests = [asyncio.create_task(request()) for _ in range(150)]
        for one in requests:
            if chance.random() < 0.2:
                asyncio.get_running_loop().call_later(chance.uniform(0, 22), one.cancel)
        results = await asyncio.gather(*requests, return_exceptions=True)
        odd = [each for each in results if each is not None and not isinstance(each, asyncio.CancelledError)]
        assert not odd, (seed, odd)
    assert loader.most_running <= parallel, seed
    assert answers["ok"] > 0, seed
    assert answers.total() >= 100, seed
