"""Simulated clusters: no request is lost or counted twice, seeds decide all, losses are as routers see them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.errors import BenchError
from bench.simulator.curves import Curves, Decode, Limits, Loads, Prefill, Transfer, read_curves
from bench.simulator.outcome import CUT, FAILED, REFUSED, SERVED, Outcome
from bench.simulator.run import Run, simulate
from bench.simulator.scenario import Loss, Pools, RoleChanges, Scenario, Slo
from bench.simulator.traffic import Arrival, Replay, Traffic

CURVES = Curves(
    name="test",
    text="",
    sources={},
    prefill=Prefill(((0, 2), (2048, 60)), adapter_factor=1.1),
    decode=Decode(((1, 6), (64, 10)), 36.0),
    transfer=Transfer(((0, 6), (4096, 13))),
    loads=Loads(store_ms=50, serial_ms=10, parallel=4, fill_ms=0.2),
    limits=Limits(max_running=64, max_kv_tokens=60_000, slots=8),
)
TRAFFIC = Traffic(60.0, 10.0, num_adapters=300, base_share=0.2, prompt_tokens=600, output_tokens=60, length_cv=0.8)
POOLS = {"pairs": Pools(prefill=3, decode=3, racks=3), "unified": Pools(unified=6, racks=3), "mixed": Pools(2, 2, 2, 2)}
SCENARIOS = {
    **{name: Scenario(CURVES, pools, TRAFFIC, host_adapters=60) for name, pools in POOLS.items()},
    "racks lost": Scenario(
        CURVES,
        POOLS["pairs"],
        TRAFFIC,
        host_adapters=60,
        losses=(Loss(3.0, "rack-0", back_after_s=2.0), Loss(4.0, "rack-1", is_silent=True)),
        detect_s=1.0,
        connect_timeout_s=0.5,
    ),
    "everything": Scenario(
        CURVES,
        Pools(2, 4, 2, racks=4),
        replace(TRAFFIC, requests_per_s=150.0),
        host_adapters=20,
        losses=(Loss(2.0, "rack-3", is_silent=True, back_after_s=3.0),),
        role_changes=RoleChanges(period_s=0.5, change_s=1.0, drain_s=1.0, high_queue_s=0.05, low_load=0.9),
        num_routers=3,
        detect_s=1.0,
    ),
}


def finished(scenario: Scenario, seed: int = 1) -> tuple[Run, Outcome]:
    run = Run(scenario, seed)
    return run, run.run()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_request_ends_once_and_nothing_is_left(name: str) -> None:
    scenario = SCENARIOS[name]
    run, outcome = finished(scenario)
    expected = Counter(arrival.at_s for arrival in scenario.traffic.arrivals(1))  # type: ignore[union-attr]
    assert Counter(outcome.at_s) == expected
    assert len(outcome.kind) == outcome.num_arrived == expected.total()
    served = np.array(outcome.kind) == SERVED
    assert not np.isnan(np.array(outcome.end_s)[served]).any()
    assert (np.array(outcome.ttft_s)[served] > 0).all()
    assert (np.array(outcome.end_s)[served] >= np.array(outcome.at_s)[served] + np.array(outcome.ttft_s)[served]).all()
    for worker in run.workers.values():
        assert not worker.attempts
        if worker.is_up:
            assert (worker.engine.used_kv_tokens, worker.engine.num_admitted, len(worker.engine.decode)) == (0, 0, 0)
    for router in run.routers:
        for load in router.loads.values():
            assert (load.num_sequences, load.prompt_tokens, load.placed_kv_tokens) == (0, 0, 0)
            assert not load.revisions


@pytest.mark.parametrize("name", ["pairs", "everything"])
def test_equal_seeds_give_equal_outcomes(name: str) -> None:
    def rows(seed: int) -> list[bytes]:
        outcome = simulate(SCENARIOS[name], seed)
        return [
            each.tobytes() for each in (outcome.at_s, outcome.ttft_s, outcome.end_s, outcome.kind, outcome.was_cold)
        ]

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_prefill_workers_end_costs_no_request(is_silent: bool) -> None:
    """All that it had is read again elsewhere; what decode workers have already goes on."""
    loss = Loss(5.0, workers=("prefill-0",), is_silent=is_silent)
    busy = replace(SCENARIOS["pairs"], traffic=replace(TRAFFIC, requests_per_s=120.0))
    outcome = simulate(replace(busy, losses=(loss,), detect_s=1.0, connect_timeout_s=0.5))
    assert outcome.count(SERVED) == outcome.num_arrived
    assert outcome.num_retries > 0


def test_a_decode_workers_end_cuts_what_it_generates_and_nothing_else() -> None:
    scenario = replace(SCENARIOS["pairs"], losses=(Loss(5.0, workers=("decode-3",)),))
    run = Run(scenario, 1)
    had: list[bool] = []

    def look() -> None:
        attempts = run.workers["decode-3"].attempts
        had.extend(not np.isnan(attempt.request.first_s) for attempt in attempts)

    run.clock.after(5.0, look)  # before the loss, which is scheduled later for the same time
    outcome = run.run()
    assert outcome.count(CUT) == had.count(True) > 0
    assert outcome.num_retries == had.count(False)
    assert outcome.count(CUT) + outcome.count(SERVED) == outcome.num_arrived


def test_who_is_lost_silently_is_called_until_that_is_noticed() -> None:
    """The requests that go there meanwhile wait for the connection's timeout, and are then served elsewhere."""
    requests = [Arrival(number / 10, None, 100, 2) for number in range(100)]
    scenario = Scenario(
        CURVES,
        Pools(unified=2),
        Replay(requests),
        losses=(Loss(4.95, workers=("unified-0",), is_silent=True),),
        detect_s=3.0,
        connect_timeout_s=1.0,
    )
    outcome = simulate(scenario)
    waited = [at_s for at_s, ttft_s in zip(outcome.at_s, outcome.ttft_s, strict=True) if ttft_s > 1.0]
    assert waited
    assert all(4.9 <= at_s <= 7.95 for at_s in waited)
    assert outcome.count(SERVED) == 100


def test_without_workers_requests_are_refused_or_fail() -> None:
    losses = (Loss(5.0, "rack-0"),)
    outcome = simulate(replace(SCENARIOS["unified"], pools=Pools(unified=2), losses=losses))
    assert outcome.count(REFUSED) > 0
    assert outcome.count(FAILED) > 0
    assert all(at_s >= 5.0 for at_s, kind in zip(outcome.at_s, outcome.kind, strict=True) if kind == REFUSED)
    assert outcome.summary(Slo())["good_share"] < 0.6


def test_a_worker_comes_back_empty_and_is_used() -> None:
    loss = Loss(3.0, workers=("unified-0",), back_after_s=2.0)
    run, outcome = finished(replace(SCENARIOS["unified"], losses=(loss,)))
    worker = run.workers["unified-0"]
    assert worker.incarnation == 2
    assert worker.engine.reading_s > 0
    assert outcome.num_loads > finished(SCENARIOS["unified"])[1].num_loads


def test_memory_begins_with_the_popular_adapters() -> None:
    cold = replace(SCENARIOS["unified"], is_warm=False, host_adapters=50)
    warm = replace(cold, is_warm=True)
    assert simulate(warm).num_loads < 0.5 * simulate(cold).num_loads


@pytest.mark.parametrize("requests_per_s", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("pools", [Pools(unified=2), Pools(unified=8), Pools(prefill=4, decode=4)], ids=str)
def test_an_idle_fleet_uses_all_its_workers(pools: Pools, requests_per_s: float) -> None:
    """From an empty memory and without queues: adapters spread over equal workers, as their homes do."""
    traffic = Traffic(requests_per_s, 1000 / requests_per_s, num_adapters=200, zipf=0.0, prompt_tokens=600)
    run, _ = finished(Scenario(CURVES, pools, traffic, host_adapters=250, is_warm=False))
    readers = [worker for worker in run.workers.values() if worker.role != "decode"]
    adapters = [worker.memory.num_loads for worker in readers]
    assert sum(adapters) >= 190
    assert min(adapters) > 0.5 * sum(adapters) / len(readers), adapters


def test_roles_change_to_where_work_is() -> None:
    """Long prompts and short answers for one prefill and four decode workers."""
    heavy = Traffic(20.0, 60.0, prompt_tokens=3000, output_tokens=8)
    scenario = Scenario(CURVES, Pools(prefill=1, decode=4), heavy)
    fixed = simulate(scenario)
    run, changed = finished(replace(scenario, role_changes=RoleChanges(period_s=1.0, change_s=2.0)))
    assert changed.num_changes >= 1
    assert sum(each.role == "prefill" for each in run.workers.values()) > 1
    assert changed.summary(Slo())["ttft_ms_p95"] < 0.5 * fixed.summary(Slo())["ttft_ms_p95"]
    assert changed.count(SERVED) == changed.num_arrived


def test_full_decode_workers_ask_for_more_of_them_though_their_prompts_wait() -> None:
    """Their KV memory has room, but 64 sequences at each are all that they take: prompts wait for that."""
    long = Traffic(20.0, 40.0, prompt_tokens=100, output_tokens=1500)
    roomy = msgspec.structs.replace(CURVES, limits=Limits(max_running=64, max_kv_tokens=1_000_000))
    scenario = Scenario(roomy, Pools(prefill=3, decode=1), long)
    changes = RoleChanges(period_s=1.0, change_s=1.0, high_load=0.9)
    run, outcome = finished(replace(scenario, role_changes=changes))
    assert outcome.num_changes >= 1
    assert sum(each.role == "decode" for each in run.workers.values()) > 1
    assert outcome.summary(Slo())["ttft_ms_p95"] < simulate(scenario).summary(Slo())["ttft_ms_p95"]


def test_figures_are_of_the_chosen_time() -> None:
    outcome = simulate(SCENARIOS["pairs"])
    whole, late = outcome.summary(Slo()), outcome.summary(Slo(), 5.0)
    assert whole["requests"] == outcome.num_arrived
    assert late["requests"] == sum(at_s >= 5.0 for at_s in outcome.at_s)
    rows = outcome.over_time(Slo(), 1.0)
    assert sum(row["requests"] for row in rows) == outcome.num_arrived
    assert sum(row["cold_loads"] for row in rows) == len(outcome.cold_load_s) == outcome.num_loads
    assert outcome.summary(Slo(ttft_s=0.0))["good_share"] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pools(prefill=1), "pairs need both"),
        (lambda: Pools(), "serves nobody"),
        (lambda: Pools(unified=2, racks=3), "racks"),
        (lambda: simulate(replace(SCENARIOS["pairs"], losses=(Loss(1.0, "rack-9"),))), "rack-9"),
        (lambda: simulate(replace(SCENARIOS["pairs"], losses=(Loss(1.0, workers=("x",)),))), "no worker x"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        make()


def test_adapters_spread_over_unified_workers_before_tokens_come_too_slowly():
    """By homes alone the busiest of four workers has 10 of 32 adapters, and a ninth of the requests miss 20 ms."""
    traffic = Traffic(28.0, 30.0, num_adapters=32, zipf=0.0, prompt_tokens=2048, output_tokens=128)
    scenario = Scenario(read_curves("h200-llama-3.1-8b"), Pools(unified=4), traffic, host_adapters=64, is_warm=True)
    assert simulate(scenario).summary(Slo(1.0, 0.02), from_s=5.0)["good_share"] >= 0.99
