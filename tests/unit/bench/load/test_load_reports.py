"""Comparisons and sweeps."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.load.compare import Ratio, figures_of, ratios_of
from bench.load.document import document as report_of
from bench.load.document import generator_of
from bench.load.generator import Outcome
from bench.load.options import Endpoint, Load
from bench.load.record import TRUNCATED, Record
from bench.load.sweep import Ended, Found, Probe, Sweep, next_rate, search, verdict
from bench.load.terminal import busy_warning
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Workload
from cli.main import main

pytestmark = pytest.mark.slow


def load(count: int, scale: float = 1.0, seed: int = 1, adapter: str | None = "a0", failed: int = 0) -> list[Record]:
    """Requests ten times a second whose times are random, around 100 ms and 10 ms times the scale."""
    draws = random.Random(seed)
    records = []
    for number in range(count):
        at_s = number * 0.1
        first_s = at_s + scale * draws.uniform(0.05, 0.15)
        token_s = tuple(first_s + each * scale * 0.01 for each in range(5))
        error = TRUNCATED if number < failed else None
        records.append(
            Record(
                *(number, 0, at_s, at_s, token_s[-1], adapter, token_s, 20, None, 5, 5),
                error=error,
            )
        )  # fmt: skip
    return records


def compare(a: list[Record], b: list[Record], slo_ms: dict[str, float] | None = None, seed: int = 1) -> list[Ratio]:
    """Of one load each."""
    return ratios_of(*(figures_of([records], slo_ms, seed + side) for side, records in enumerate((a, b))))


def is_clear(ratio: Ratio) -> bool:
    """Whether the interval leaves out 1; there is one."""
    assert ratio.low is not None
    assert ratio.high is not None
    return not ratio.low <= 1 <= ratio.high


# ---- comparisons ----------------------------------------------------------------------------------------------------


def test_a_slower_system_is_clearly_slower():
    found = {each.name: each for each in compare(load(300), load(300, scale=2.0, seed=2))}
    assert found["TPOT p50"].ratio == pytest.approx(2.0)
    assert found["TTFT p50"].low < 2.0 < found["TTFT p50"].high
    assert found["TTFT p50"].low > 1.7
    assert is_clear(found["end to end p99"])
    assert found["output"].low <= 1.0 <= found["output"].high  # an open loop: the same rate


def test_equal_systems_are_not_told_apart():
    found = compare(load(300), load(300, seed=2), {"ttft": 120.0})
    assert [each.name for each in found if is_clear(each)] == []
    assert found[-1].name == "goodput"
    assert found == compare(load(300), load(300, seed=2), {"ttft": 120.0})


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Both sides from one distribution, 60 times: the true ratio is 1. With 95 % intervals 57 are expected."""
    covered = 0
    for seed in range(60):
        found = {each.name: each for each in compare(load(60, seed=seed), load(60, seed=1000 + seed), seed=seed)}
        covered += not is_clear(found["TTFT p50"])
    assert covered >= 52


def test_repeats_are_averaged_and_drawn_again_alike_for_all_systems():
    """A machine that is twice as slow in one repeat of three leaves the ratio as certain as it was."""
    fast, slow = (
        [load(300, scale=scale) for scale in (1.0, 1.0, 2.0)],
        [load(300, scale=2 * s) for s in (1.0, 1.0, 2.0)],
    )
    a, b = (figures_of(loads, {"ttft": 120.0}, seed) for seed, loads in enumerate((fast, slow)))
    of_a = {each.name: each for each in a}
    one, two = (float(compare(each, each)[0].a) for each in (fast[0], fast[2]))
    assert of_a["TTFT p50"].value == pytest.approx((2 * one + two) / 3)
    low, high = of_a["TTFT p50"].interval
    assert high / low > 1.5  # the repeats differ much
    ratio = next(each for each in ratios_of(a, b) if each.name == "TTFT p50")
    assert ratio.low < 2.0 < ratio.high
    assert ratio.high / ratio.low < 1.3
    assert {"goodput", "answered", "output"} <= of_a.keys()


def test_how_many_requests_came_to_an_end_does_not_change_the_digest():
    """A closed loop for a time sends as many as the server answers."""
    workload = Workload("w", "", "", lengths=FixedLengths(4, 1))
    made = Load(Endpoint("http://x", "m"), workload, duration_s=5.0, concurrency=1)
    found = [report_of(made, Outcome(tuple(load(count)), 0.1, 1), "", {})["workload"] for count in (20, 300)]
    assert found[0] == found[1]
    assert found[0]["num_digested"] == 256


def test_few_seconds_have_rates_and_no_interval_of_them():
    found = {each.name: each for each in compare(load(50), load(50, scale=2.0))}
    assert found["output"].low is None
    assert found["output"].ratio == pytest.approx(1.0, rel=0.1)
    assert is_clear(found["TPOT p50"])
    assert {each.name: each for each in compare(load(120), load(120))}["output"].low is not None


@pytest.mark.parametrize(("cpu_s", "processes", "warns"), [(1.0, 1, False), (1.7, 1, True), (1.7, 2, False)])
def test_a_generator_that_is_the_bottleneck_says_so(cpu_s: float, processes: int, warns: bool):
    """In a closed loop it shows in no lateness: a request is due when it leaves."""
    records = load(20)  # of two seconds
    generator = generator_of(Outcome(tuple(records), cpu_s, processes))
    assert ("the generator was busy" in busy_warning(generator)) == warns


def test_nothing_to_compare():
    assert compare(load(3, failed=3), load(3)) == []


def test_every_field_of_the_file_is_documented():
    workload = Workload("random", "", "", lengths=FixedLengths(8, 4))
    endpoint = Endpoint("http://x", "m", ("a0",), extra_body={"top_k": 1})
    asked = Load(endpoint, workload, num_requests=40, requests_per_s=5.0, arrivals="bursts")
    found = report_of(asked, Outcome(tuple(load(40, failed=2)), 0.1, 1), "prelude", {"ttft": 500.0})
    page = (Path(__file__).parents[4] / "docs" / "benchmarks.md").read_text()
    fields = [*found, *found["settings"], *found["workload"], *found["generator"], *found["summary"]]
    for name in ("goodput", "errors", "by_use"):
        fields += found["summary"][name]
    fields += [*found["summary"]["errors"]["most_frequent"][0], *found["requests"][0]]
    fields += found["summary"]["ttft_ms"]
    missing = [name for name in fields if f"`{name}`" not in page and name not in ("format", "benchmark")]
    assert missing == []


# ---- sweeps ---------------------------------------------------------------------------------------------------------


def swept(capacity: float, sweep: Sweep) -> Found:
    """A server that holds its objective up to a rate."""

    async def probe(rate: float) -> Probe:
        return Probe(rate, 1.0 if rate <= capacity else 0.5, {})

    return asyncio.run(search(sweep, probe))


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 100.0, 5000.0])
def test_a_sweep_finds_the_capacity(capacity: float):
    found = swept(capacity, Sweep(precision=0.05))
    assert found.best is not None
    assert capacity / 1.05 <= found.best <= capacity
    assert found.is_bounded
    assert len(found.probes) < 24


def test_a_server_that_holds_nothing_and_one_that_holds_all():
    nothing = swept(0.0, Sweep())
    assert (nothing.best, nothing.is_bounded) == (None, True)
    assert verdict(nothing).startswith("no rate held the objectives; the lowest tried was 0.0")
    everything = swept(1e9, Sweep(max_rate=64.0))
    assert (everything.best, everything.is_bounded) == (64.0, False)
    assert verdict(everything).startswith("at least 64 requests/s")


def test_noise_ends_a_sweep_and_does_not_prolong_it():
    assert next_rate(Sweep(), 10.0, 9.0) is None
    assert next_rate(Sweep(), 4.0, 16.0) == 8.0
    assert next_rate(Sweep(), 4.0, None) == 8.0


def test_the_rates_at_the_border_are_repeated_and_judged_by_their_mean():
    shares = {4.0: [1.0, 1.0], 5.0: [1.0, 0.9, 0.9], 6.25: [0.5, 0.5]}
    asked = []

    async def probe(rate: float) -> Probe:
        asked.append(rate)
        return Probe(rate, shares[rate].pop(0), {})

    found = asyncio.run(search(Sweep(first_rate=4.0, growth=1.25, precision=0.25, repeats=2), probe))
    assert asked == [4.0, 5.0, 6.25, 5.0, 4.0]  # 5 held once, and not in the mean
    assert (found.best, found.is_bounded) == (4.0, True)


def test_a_search_goes_on_from_what_is_known():
    known = [Probe(rate, 1.0 if rate <= 8 else 0.0, {}) for rate in (4.0, 8.0, 16.0)]
    asked = []

    async def probe(rate: float) -> Probe:
        asked.append(rate)
        return Probe(rate, 0.0, {})

    found = asyncio.run(search(Sweep(precision=0.5), probe, known))
    assert asked == [pytest.approx(128**0.5)]
    assert (found.best, len(found.probes)) == (8.0, 4)


def test_a_probe_has_enough_requests_for_its_share():
    assert [Sweep(share=share).min_requests for share in (0.5, 0.9, 0.99, 0.9999, 1.0)] == [10, 10, 100, 1000, 1000]
    assert [Sweep(share=0.99).probe_s(rate) for rate in (1000.0, 1.0, 0.001)] == [30.0, 150.0, 600.0]


def test_an_early_end_keeps_what_was_found():
    async def probe(rate: float) -> Probe:
        if rate > 2:
            raise Ended("enough")
        return Probe(rate, 1.0, {})

    found = asyncio.run(search(Sweep(), probe))
    assert (found.best, found.is_bounded, len(found.probes)) == (2.0, False, 2)
    assert verdict(found) == "2 requests/s held the objectives; the search ended early: enough"
    with pytest.raises(Ended):
        asyncio.run(search(Sweep(first_rate=3.0), probe))


def test_a_rate_that_conversations_did_not_reach_is_told():
    def told(came_per_s: float | None) -> str:
        return verdict(
            Found(40.0, True, (Probe(40.0, 1.0, {}, came_per_s, has_turns=True), Probe(80.0, 0.5, {}, 20.0)))
        )

    assert told(None) == told(38.0) == "40 requests/s hold the objectives"
    assert told(26.3).startswith("40 requests/s hold the objectives; but 26.3 came per second")


@pytest.mark.parametrize("sweep", [Sweep(first_rate=0.0), Sweep(share=1.5), Sweep(precision=0.0)])
def test_a_sweep_that_makes_no_sense(sweep: Sweep):
    with pytest.raises(BenchError, match="--"):
        swept(1.0, sweep)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs objectives"),
        (("--goodput", "ttft:5", "--num-requests", "9"), "--num-requests with --sweep"),
    ],
)
def test_what_a_sweep_cannot_do(words: tuple[str, ...], says: str, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prelude"])
    with pytest.raises(SystemExit, match=says):
        main(["bench", "load", "--url", "http://x", "--sweep", *words])
