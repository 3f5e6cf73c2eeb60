"""Two routers admit together what one would, whoever gets the requests, and without the database for a while, too."""

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers.sharing_routers import ACME, STEP_S, Database, caller, routers, run

from adapters.catalog.quota_leases import GaugeAsk, RateAsk, lease_gauge, lease_rate
from adapters.errors import CatalogUnavailable
from router.quotas import leases, quotas, sharing
from router.quotas.budget import Use
from router.quotas.quotas import Admission


@pytest.mark.parametrize("offered", [(8, 8), (14, 2), (16, 0)])
@pytest.mark.parametrize(
    ("limits", "use", "rate", "capacity"),
    [
        ({"requests_per_s": 50}, Use(), 50, 50),
        ({"prompt_tokens_per_min": 60_000}, Use(prompt_tokens=100), 10, 600),
        ({"output_tokens_per_min": 6_000}, Use(output_tokens=100), 1, 60),
    ],
)
async def test_limits_are_exact_within_five_percent_over_two_routers(
    offered: tuple[int, int], limits: dict[str, float], use: Use, rate: float, capacity: float
):
    database = Database()
    pair = routers(database, **limits)
    for router in pair:
        router.offer(1, use)  # both know of the tenant
    await run(database, pair, offered, use, 30)
    # What one router would admit: a full bucket, and what its rate adds in half a minute.
    assert sum(router.num_admitted for router in pair) == pytest.approx(capacity + 30 * rate, rel=0.05)


@pytest.mark.parametrize("num_routers", [2, 4])
async def test_a_burst_at_all_routers_takes_at_most_thirty_percent_more(num_routers: int):
    capacity, rate, use = 128, 128 / 60, Use(prompt_tokens=100)
    database = Database()
    group = routers(database, num_routers, prompt_tokens_per_min=100 * capacity)
    for router in group:  # they know of the tenant, and of each other
        router.offer(1, use)
    await run(database, group, [0] * num_routers, use, 3)
    for router in group:
        router.num_admitted = 0
    for number in range(1, 6):
        await run(database, group, [2 * capacity] * num_routers, use, 2 * STEP_S)
        in_all, exact = sum(router.num_admitted for router in group), capacity + rate * 2 * STEP_S * number
        assert in_all - exact <= 0.3 * capacity
    assert in_all >= exact
    await run(database, group, [4] * num_routers, use, 30)
    assert sum(router.num_admitted for router in group) == pytest.approx(exact + 30 * rate, rel=0.05)


@pytest.mark.parametrize("wanted", [(50, 50), (90, 10), (100, 0), (200, 200), (5, 200)])
async def test_what_is_in_use_at_a_time_is_shared_by_who_needs_it(wanted: tuple[int, int]):
    database = Database()
    pair = routers(database, sequences=100)
    open_requests: list[list[Admission]] = [[], []]
    for step in range(60):
        database.now += STEP_S
        for number, router in enumerate(pair):
            held = open_requests[number]
            if held:  # some end
                held.pop(0).__exit__(None, None, None)
            while len(held) < wanted[number] and (begun := router.begun(Use(sequences=1))) is not None:
                held.append(begun)
            if step % 4 == number:
                await router.sharing.renew()
    assert sum(map(len, open_requests)) == pytest.approx(min(100, sum(wanted)), rel=0.05)


@pytest.mark.parametrize("num_routers", [2, 4])
@pytest.mark.parametrize("at_one", [True, False])
@pytest.mark.parametrize(("limit", "size"), [(2, 1), (16, 5), (16, 16)])
async def test_a_small_limit_of_many_idle_routers_is_there_for_who_tries_again(
    limit: int, size: int, at_one: bool, num_routers: int
):
    database = Database()
    group = routers(database, num_routers, sequences=limit)
    for router in group:
        router.offer(1, Use(sequences=limit))  # all know of the tenant
    for step in range(100):  # ten idle seconds
        database.now += STEP_S
        await group[step % num_routers].sharing.renew()
    admitted: list[Admission] = []
    for second in range(30):
        begun = group[0 if at_one else second % num_routers].begun(Use(sequences=size))
        admitted += [] if begun is None else [begun]
        if second == 8:
            assert admitted
        in_use = [router.quotas.budgets["tenant:acme"].sequences.used for router in group]
        assert sum(in_use) == len(admitted) * size <= limit
        for step in range(4 * num_routers):
            database.now += 0.25 / num_routers
            await group[step % num_routers].sharing.renew()
    assert len(admitted) == limit // size


async def test_routers_that_all_want_more_than_their_part_serve_some_requests():
    """Four routers have four sequences each, and each has a request of five."""
    database = Database()
    group = routers(database, 4, sequences=16)
    for _ in range(5):
        for router in group:
            router.offer(1, Use(sequences=5))
            database.now += STEP_S
            await router.sharing.renew()
            assert sum(held for _, held in database.holdings.values()) <= 16
    assert [router.begun(Use(sequences=5)) is None for router in group].count(False) == 3


@pytest.mark.parametrize("error", [CatalogUnavailable("down"), RuntimeError("permission denied")])
async def test_without_the_database_each_router_has_its_part(error: Exception, caplog: pytest.LogCaptureFixture):
    database = Database(error=error)
    pair = routers(database, requests_per_s=50)
    await run(database, pair, (10, 10), Use(), 10)
    database.is_up = False
    await run(database, pair, (10, 10), Use(), 3)
    before = [router.num_admitted for router in pair]
    await run(database, pair, (10, 10), Use(), 20)
    for router, count in zip(pair, before, strict=True):
        assert router.num_admitted - count == pytest.approx(20 * 25, rel=0.05)
        assert "prelude_router_quota_lease_failures_total 1" in router.metrics.page().decode()
    database.is_up = True
    await run(database, pair, (20, 0), Use(), 3)
    before = [router.num_admitted for router in pair]
    await run(database, pair, (20, 0), Use(), 20)
    assert pair[0].num_admitted - before[0] == pytest.approx(20 * 50, rel=0.05)
    said = "quota database unreachable: using an equal part of each limit"
    assert [record.message for record in caplog.records].count(said) == 2  # once at each router


async def test_without_the_database_each_router_has_its_part_of_what_is_in_use():
    database = Database()
    pair = routers(database, sequences=10)
    await run(database, pair, (1, 0), Use(sequences=10), 2)
    database.is_up = False
    await run(database, pair, (0, 1), Use(sequences=5), 3)
    allowed = [router.quotas.budgets["tenant:acme"].sequences.allowed for router in pair]
    assert allowed == [5, 5]
    assert pair[1].num_admitted


async def test_many_tenants_are_asked_for_in_turns_and_idle_ones_once_a_second(monkeypatch: pytest.MonkeyPatch):
    """All of a thousand tenants at each renewal held up the event loop and the database."""
    monkeypatch.setattr(leases, "_MOST", 2)
    database = Database()
    router, _ = routers(database, prompt_tokens_per_min=60_000, sequences=10)
    asked: list[set[str]] = []

    def noted(*arguments: Any, **named: Any) -> Any:
        found = leases.ask(*arguments, **named)
        asked.append({each.subject.partition("/")[0][-1] for _, each in (*found.rates, *found.gauges)})
        return found

    monkeypatch.setattr(sharing, "ask", noted)
    for tenant in "abcde":
        with router.quotas.admission(caller(tenant)) as admission:
            admission.take(Use(prompt_tokens=1, sequences=1))
            admission.settle(1, 0)
    for _ in range(100):
        database.now += STEP_S
        await router.sharing.renew()
    assert asked[:3] == [{"a", "b"}, {"c", "d"}, {"e", "a"}]
    assert max(map(len, asked)) == 2
    for tenant in "abcde":
        assert 9 <= sum(tenant in each for each in asked) <= 12  # in ten seconds


async def test_an_idle_tenant_is_forgotten_while_others_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quotas, "_MAX_BUDGETS", 1)
    database = Database()
    router, _ = routers(database, sequences=1)
    for second in range(70):
        with router.quotas.admission(caller(f"t{second}")):
            database.now += 1
        await router.sharing.renew()
    assert "tenant:t0" not in router.quotas.budgets


async def test_a_router_that_stops_gives_back_what_it_has():
    database = Database()
    pair = routers(database, prompt_tokens_per_min=60_000, sequences=10)
    await run(database, pair, (1, 1), Use(prompt_tokens=10, sequences=1), 2)
    await pair[1].sharing.renew(gives_back=True)
    assert len(database.members) == 1
    assert {who for _, who in database.holdings} == database.members
    database.now += 60
    await pair[0].sharing.renew()
    (pool,) = [pool for subject, pool in database.pools.items() if subject.endswith("prompt_tokens")]
    level = pair[0].quotas.budgets["tenant:acme"].buckets["prompt_tokens"].level
    assert pool.level + level == pytest.approx(60_000, rel=0.05)


async def test_who_waits_as_long_as_it_is_told_is_admitted():
    database = Database()
    one, other = routers(database, prompt_tokens_per_min=600)
    use = Use(prompt_tokens=100)
    other.offer(1, use)
    one.offer(7, use)
    await run(database, (one, other), (0, 0), use, 1)
    one.offer(7, use)
    num_tries, before, began_at = 0, one.num_admitted, database.now
    while database.now - began_at < 120:
        num_tries += 1
        if (wait_s := one.wait_s(use)) is not None:
            for _ in range(math.ceil(wait_s / 0.2)):
                database.now += 0.2
                for router in (one, other):
                    await router.sharing.renew()
    assert one.num_admitted - before >= 11  # of the twelve that the rate adds
    assert num_tries <= 45  # one that is admitted, one too early, one before the lease has come


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_a_large_request_gets_its_turn_beside_four_times_what_the_rate_permits(num_routers: int):
    database = Database()
    group = routers(database, num_routers, prompt_tokens_per_min=6000)
    if num_routers == 1:
        group[0].quotas.num_sharing = None  # it counts alone
    random, num_tries, large, is_admitted = Random(7), 0, Use(prompt_tokens=3000), False
    for number in range(3000):
        database.now += STEP_S
        if num_routers > 1:
            await group[number % num_routers].sharing.renew()
        is_tried = number >= 300 and not is_admitted and random.random() < 0.1  # once a second
        is_before = random.random() < 0.5  # the two small ones, which have 400 tokens a second
        for offer_small in (is_before, not is_before):
            if offer_small:
                for router in group:
                    router.offer(2 // num_routers, Use(prompt_tokens=20))
            elif is_tried:
                num_tries += 1
                is_admitted = group[0].wait_s(large) is None
    assert is_admitted
    assert num_tries <= 40
    used = 20 * (sum(router.num_admitted for router in group) - 1) + 3000
    assert used == pytest.approx(6000 + 100 * 300, rel=0.05)


async def test_unused_budgets_are_given_back_and_forgotten():
    database = Database()
    (one,) = routers(database, 1, requests_per_s=10, sequences=10)
    one.offer(1, Use())
    await one.sharing.renew()
    assert one.quotas.budgets
    database.now += 40
    one.metrics.page()  # a scrape is no use
    database.now += 21
    await one.sharing.renew()
    assert not one.quotas.budgets
    assert sum(held for _, held in database.holdings.values()) == 0
    (pool,) = database.pools.values()
    assert pool.level == pytest.approx(10)


async def test_a_budget_is_kept_while_a_request_runs_and_while_it_is_owed():
    database = Database()
    (one,) = routers(database, 1, output_tokens_per_min=60)
    with one.quotas.admission(ACME) as admission:
        admission.take(Use(output_tokens=1))
        for _ in range(3):
            database.now += 61
            await one.sharing.renew()
        admission.settle(0, 600)
    await one.sharing.renew()
    before = one.num_admitted
    one.offer(1, Use(output_tokens=1))
    assert one.num_admitted == before
    database.now += 61
    await one.sharing.renew()
    one.offer(1, Use(output_tokens=1))
    assert one.num_admitted == before


asks = st.tuples(st.integers(0, 2), st.floats(0, 3), st.floats(0, 50), st.floats(0, 1))


@given(st.lists(asks, max_size=60), st.floats(0.1, 20), st.floats(1, 100))
@settings(max_examples=200)
def test_leases_neither_make_nor_lose_anything(steps, rate, capacity):
    """Three routers, which use part of what they have."""
    pool, now, held, used = None, 0.0, [0.0, 0.0, 0.0], 0.0
    for number, gap, wanted, part in steps:
        now += gap
        pool, granted = lease_rate(pool, RateAsk("s", rate, capacity, held[number], min(wanted, capacity)), now, 3)
        held[number] += granted
        spent = max(0.0, held[number]) * part
        held[number] -= spent
        used += spent
        assert pool.level + sum(held) + used <= capacity + rate * now + 1e-6


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 200), st.floats(0, 100)), max_size=40))
@settings(max_examples=100)
def test_holdings_never_exceed_the_limit(steps):
    held, wants = [0.0] * 4, [0.0] * 4
    for number, wanted, unit in steps:
        others = [each for each in range(4) if each != number]
        wants[number] = wanted
        asked = GaugeAsk("s", 100, 0, wanted, unit)
        held[number] = lease_gauge(asked, [(wants[each], held[each]) for each in others])
        assert sum(held) <= 100 + 1e-6
