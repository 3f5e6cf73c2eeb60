"""The file of a load, and sweeps."""

import asyncio
from pathlib import Path

import pytest
from support.commands import Prelude

from bench.load.document import document as report_of
from bench.load.document import generator_of
from bench.load.generator import Outcome
from bench.load.options import Endpoint, Load
from bench.load.record import TRUNCATED, Record
from bench.load.sweep import Probe, Sweep, next_rate, search
from bench.load.terminal import busy_warning
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Workload

pytestmark = pytest.mark.slow


def load(count: int, failed: int = 0) -> list[Record]:
    """Requests ten times a second, of which the first fail."""
    return [
        Record(
            *(number, 0, 0.1 * number, 0.1 * number, 0.1 * number + 0.2, "a0", (0.1 * number + 0.1,), 20, None, 5, 5),
            error=TRUNCATED if number < failed else None,
        )
        for number in range(count)
    ]  # fmt: skip


# ---- the file -------------------------------------------------------------------------------------------------------


def test_how_many_requests_came_to_an_end_does_not_change_the_digest():
    """A closed loop for a time sends as many as the server answers."""
    workload = Workload("w", "", "", lengths=FixedLengths(4, 1))
    made = Load(Endpoint("http://x", "m"), workload, duration_s=5.0, concurrency=1)
    found = [report_of(made, Outcome(tuple(load(count)), 0.1, 1), "", {})["workload"] for count in (20, 300)]
    assert found[0] == found[1]
    assert found[0]["num_digested"] == 256


@pytest.mark.parametrize(("cpu_s", "processes", "warns"), [(1.0, 1, False), (1.7, 1, True), (1.7, 2, False)])
def test_a_generator_that_is_the_bottleneck_says_so(cpu_s: float, processes: int, warns: bool):
    """In a closed loop it shows in no lateness: a request is due when it leaves."""
    records = load(20)  # of two seconds
    generator = generator_of(Outcome(tuple(records), cpu_s, processes))
    assert ("the generator was busy" in busy_warning(generator)) == warns


def test_every_field_of_the_file_is_documented():
    workload = Workload("random", "", "", lengths=FixedLengths(8, 4))
    endpoint = Endpoint("http://x", "m", ("a0",), extra_body={"top_k": 1})
    asked = Load(endpoint, workload, num_requests=40, requests_per_s=5.0)
    found = report_of(asked, Outcome(tuple(load(40, failed=2)), 0.1, 1), "prelude", {"ttft": 500.0})
    page = (Path(__file__).parents[4] / "docs" / "benchmarks.md").read_text()
    fields = [*found, *found["settings"], *found["workload"], *found["generator"], *found["summary"]]
    for name in ("goodput", "errors"):
        fields += found["summary"][name]
    fields += [*found["summary"]["errors"]["most_frequent"][0], *found["requests"][0]]
    fields += found["summary"]["ttft_ms"]
    missing = [name for name in fields if f"`{name}`" not in page and name not in ("format", "benchmark")]
    assert missing == []


# ---- sweeps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 100.0, 5000.0])
async def test_a_sweep_finds_the_capacity(capacity: float):
    async def probe(rate: float) -> Probe:
        return Probe(rate, 1.0 if rate <= capacity else 0.5, {})

    found = await search(Sweep(precision=0.05), probe)
    assert found.best is not None
    assert capacity / 1.05 <= found.best <= capacity
    assert found.is_bounded
    assert len(found.probes) < 24


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


@pytest.mark.parametrize(
    ("first_rate", "asked"),
    [
        (9.0, [9.0, 10.8]),  # between what held and what failed, then on by the growth
        (30.0, [4.8, 5.76, 6.912, 8.2944, 9.95328]),  # above what failed
    ],
)
def test_a_search_under_other_objectives_begins_at_its_own_rate(first_rate: float, asked: list[float]):
    known = [Probe(4.0, 1.0, {}), Probe(20.0, 0.0, {})]
    rates = []

    async def probe(rate: float) -> Probe:
        rates.append(rate)
        return Probe(rate, 1.0 if rate < 9.9 else 0.0, {})

    asyncio.run(search(Sweep(first_rate=first_rate, growth=1.2, precision=0.2), probe, known))
    assert rates == pytest.approx(asked)


def test_a_probe_has_enough_requests_for_its_share():
    assert [Sweep(share=share).min_requests for share in (0.5, 0.9, 0.99, 0.9999, 1.0)] == [10, 10, 100, 1000, 1000]
    assert [Sweep(share=0.99).probe_s(rate) for rate in (1000.0, 1.0, 0.001)] == [30.0, 150.0, 600.0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs objectives"),
        (("--goodput", "ttft:5", "--num-requests", "9"), "--num-requests with --sweep"),
        (("--goodput", "ttft:5", "--concurrency", "9"), "--concurrency with --sweep"),
    ],
)
def test_what_a_sweep_cannot_do(words: tuple[str, ...], says: str, prelude: Prelude):
    prelude.refuses("bench", "load", "--url", "http://x", *words, "--sweep", says=says, status=2)
