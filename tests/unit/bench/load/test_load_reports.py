"""Pages, comparisons and sweeps."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from bench.errors import BenchError
from bench.load.document import document as report_of
from bench.load.document import generator_of
from bench.load.generator import Outcome
from bench.load.options import Endpoint, Load
from bench.load.record import TRUNCATED, Record
from bench.load.report.charts import Series, bar_chart, distribution_chart, line_chart, line_image, log_ticks, ticks
from bench.load.report.compare import _resampled_quantiles, compare, differences, failures, figures_of, ratios_of, table
from bench.load.report.page import load_page
from bench.load.report.terminal import busy_warning
from bench.load.run import Files, write
from bench.load.summary import summary
from bench.load.sweep import Ended, Found, Probe, Sweep, next_rate, search, verdict
from bench.workloads.lengths import FixedLengths
from bench.workloads.workload import Workload
from cli.main import main

pytestmark = pytest.mark.slow

HOSTILE = '<script>alert("x")</script>'
VOID = {"meta", "br", "line", "rect", "polyline"}


class Checker(HTMLParser):
    """Every element that is opened is closed, and nothing points outside of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "xlink:href", "onload", "onclick"}
        if tag not in VOID or (tag in ("rect", "polyline")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Checker:
    assert page.startswith("<!doctype html>")
    assert not re.search(r"https?://(?!x\b)", page)
    assert "@import" not in page
    assert "url(" not in page
    return Checker(page)


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
                error=error, detail=HOSTILE if error else "",
            )
        )  # fmt: skip
    return records


def document(records: list[Record], **changes: Any) -> dict[str, Any]:
    return {
        "format": "prelude-bench-load/1",
        "commit": "0123456",
        "command": f"prelude bench load {HOSTILE}",
        "hardware": {"cpu": "a CPU", "cores": 2},
        "workload": {"name": "punica", "text": HOSTILE, "source": "x", "sha256": "ff", "num_digested": 3},
        "settings": {
            "url": "http://x", "model": HOSTILE, "num_adapters": 1, "arrivals": "poisson", "requests_per_s": 10.0,
            "seed": 1,
        },
        "summary": summary(records, {"ttft": 120.0}),
        "requests": msgspec.to_builtins(records),
        **changes,
    }  # fmt: skip


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [0, 3, 40])
def test_the_page_stands_alone_and_says_what_failed(failed: int):
    records = load(40, adapter=HOSTILE, failed=failed)
    page = load_page(document(records), records)
    names = checked(page).names
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert names.count("script") == 0
    assert (f"{failed} of 40 requests failed" in page) == bool(failed)
    if failed < 40:
        assert names.count("svg") == 7
        assert "first request for its adapter" in page


def test_a_chart_has_every_point_in_its_frame():
    svg = line_chart("title", "x", "y", [Series("one", [(0, 0), (5, 10), (10, 3)]), Series("two", [(2, 1)], 1)])
    assert svg.count("<polyline") == 2
    assert 'class="key t1">two' in svg
    numbers = [float(each) for each in re.search(r'points="([^"]+)"', svg)[1].replace(",", " ").split()]
    assert numbers[0::2] == [64, 346, 628]
    assert numbers[1::2] == [220, 12, pytest.approx(157.6)]


def test_an_image_is_a_file_of_its_own_with_the_lines_and_their_names():
    image = line_image("t < u", "x", "y", [Series("one", [(1, 5), (100, 10)]), Series("two & more", [(2, 1)], 1)], True)
    svg = ElementTree.fromstring(image)
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["\u25a0 one", "\u25a0 two & more"]
    assert [each.get("class") for each in svg.iter("{http://www.w3.org/2000/svg}polyline")] == ["t0", "t1"]


def test_a_long_line_is_thinned_to_its_ends():
    svg = line_chart("t", "x", "y", [Series("one", [(x, x) for x in range(100_001)])])
    points = re.search(r'points="([^"]+)"', svg)[1].split()
    assert len(points) == 400
    assert (points[0], points[-1]) == ("64.0,220.0", "628.0,12.0")


def test_the_axis_is_logarithmic_where_values_span_much_and_not_else():
    def labels(*values: float) -> list[str]:
        svg = distribution_chart("t", "x", [("a", values)])
        return re.findall(r'text-anchor="middle">([\d.e+-]+)</text>', svg)

    assert labels(1, 10, 100) == ["1", "2", "5", "10", "20", "50", "100"]
    assert labels(100, 150, 200) == ["100", "120", "140", "160", "180", "200"]
    assert labels(10, 10 + 1e-9) == ["9", "9.5", "10", "10.5", "11"]


def test_a_distribution_begins_at_the_share_of_zeros():
    svg = distribution_chart("t", "x", [("a", [0.0, 0.0, 0.0, 10.0]), ("b", [5.0, 20.0])])
    (first, second), _ = (each.split() for each in re.findall(r'points="([^"]+)"', svg))
    assert [float(each.split(",")[1]) for each in (first, second)] == [220 - 0.75 * 208, 12.0]


def test_charts_of_nothing_say_so():
    for svg in (line_chart("t", "x", "y", []), bar_chart("t", "y", []), distribution_chart("t", "x", [("a", [0.0])])):
        assert "nothing to show" in svg
    assert "<svg" in distribution_chart("t", "x", [("a", [1.0])])
    assert "<svg" in bar_chart("t", "y", [("a", 0.0)])


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 3, [3])]
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    assert ticks(low, high) == pytest.approx(expected)
    assert log_ticks(1, 10) == [1, 2, 5, 10]
    assert log_ticks(0.5, 2e6) == [10.0**power for power in range(7)]


# ---- comparisons ----------------------------------------------------------------------------------------------------


def test_a_slower_system_is_clearly_slower():
    found = {each.name: each for each in compare(load(300), load(300, scale=2.0, seed=2))}
    assert found["TPOT p50"].ratio == pytest.approx(2.0)
    assert found["TTFT p50"].low < 2.0 < found["TTFT p50"].high
    assert found["TTFT p50"].low > 1.7
    assert found["end to end p99"].is_clear
    assert found["output"].low <= 1.0 <= found["output"].high  # an open loop: the same rate


def test_equal_systems_are_not_told_apart():
    found = compare(load(300), load(300, seed=2), {"ttft": 120.0})
    assert [each.name for each in found if each.is_clear] == []
    assert found[-1].name == "goodput"
    assert found == compare(load(300), load(300, seed=2), {"ttft": 120.0})


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Both sides from one distribution, 60 times: the true ratio is 1. With 95 % intervals 57 are expected."""
    covered = 0
    for seed in range(60):
        found = {each.name: each for each in compare(load(60, seed=seed), load(60, seed=1000 + seed), seed=seed)}
        covered += not found["TTFT p50"].is_clear
    assert covered >= 52


@pytest.mark.parametrize("count", [1, 2, 37, 1000])
def test_quantiles_drawn_by_rank_are_those_of_requests_drawn_again(count: int):
    values = np.random.default_rng(7).lognormal(size=count)
    generator = np.random.default_rng(8)
    drawn = values[generator.integers(0, count, (20_000, count))]
    again = np.quantile(drawn, (0.5, 0.9, 0.99), axis=1, method="inverted_cdf").T
    by_rank = np.concatenate([_resampled_quantiles(values, generator) for _ in range(10)])
    order = np.sort(values)
    for share in (0.025, 0.25, 0.5, 0.75, 0.975):
        a, b = (np.searchsorted(order, np.quantile(each, share, axis=0)) for each in (again, by_rank))
        assert np.all(np.abs(a - b) <= max(1, 0.004 * count)), (share, a, b)
    if count > 2:  # the quantiles of one draw belong together
        a, b = (np.corrcoef(np.searchsorted(order, each).T) for each in (again, by_rank))
        assert np.abs(a - b).max() < 0.05


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


def test_failures_and_differences_are_said():
    a, b = load(20), load(20, failed=5)
    assert failures(a, b) == "failed requests, which are in no latency: A: 0 of 20; B: 5 of 20"
    assert differences(document(a), document(a)) == []
    other = document(b, workload={"name": "chat", "sha256": "00", "num_digested": 3})
    assert differences(document(a), other) == ["workload name: punica and chat", "workload sha256: ff and 00"]


def test_all_settings_but_the_address_are_compared():
    a, b = (document(load(20)) for _ in range(2))
    b["settings"] = {**b["settings"], "url": "http://y", "timeout_s": 5.0, "num_requests": 9}
    assert differences(a, b) == ["num_requests: None and 9", "timeout_s: None and 5.0"]
    b["workload"] = {**b["workload"], "num_digested": 4, "sha256": "00"}
    assert differences(a, b)[0] == "workload num_digested: 3 and 4"
    assert "sha256" not in str(differences(a, b))


def test_how_many_requests_came_to_an_end_does_not_change_the_digest():
    """A closed loop for a time sends as many as the server answers."""
    workload = Workload("w", "", "", lengths=FixedLengths(4, 1))
    made = Load(Endpoint("http://x", "m"), workload, duration_s=5.0, concurrency=1)
    found = [report_of(made, Outcome(tuple(load(count)), 0.1, 1), "", {})["workload"] for count in (20, 300)]
    assert found[0] == found[1]
    assert found[0]["num_digested"] == 256


def test_few_seconds_have_rates_and_no_interval_of_them():
    found = {each.name: each for each in compare(load(50), load(50, scale=2.0))}
    assert (found["output"].low, found["output"].is_clear) == (None, False)
    assert found["output"].ratio == pytest.approx(1.0, rel=0.1)
    assert found["TPOT p50"].is_clear
    assert "none: too short" in table(list(found.values()))
    assert {each.name: each for each in compare(load(120), load(120))}["output"].low is not None


@pytest.mark.parametrize(("cpu_s", "processes", "warns"), [(1.0, 1, False), (1.7, 1, True), (1.7, 2, False)])
def test_a_generator_that_is_the_bottleneck_says_so(cpu_s: float, processes: int, warns: bool):
    """In a closed loop it shows in no lateness: a request is due when it leaves."""
    records = load(20)  # of two seconds
    generator = generator_of(Outcome(tuple(records), cpu_s, processes))
    assert ("the generator was busy" in busy_warning(generator)) == warns
    assert ("the generator was busy" in load_page(document(records, generator=generator), records)) == warns


def test_nothing_to_compare():
    assert compare(load(3, failed=3), load(3)) == []


def test_two_files_on_the_command_line(tmp_path: Path, capsys, monkeypatch):
    for name, records in (("a", load(60)), ("b", load(60, scale=2.0, failed=2))):
        (tmp_path / f"{name}.json").write_text(json.dumps(document(records)))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    main(["bench", "load", "--compare", *files])
    shown = capsys.readouterr().out
    assert "A: 0 of 60; B: 2 of 60" in shown
    assert re.search(r"TPOT p50 +10\.000 +20\.000 +2\.000 +2\.000 to 2\.000 +ms", shown)
    assert "goodput" in shown
    with pytest.raises(SystemExit, match=r"none\.json: No such file"):
        main(["bench", "load", "--compare", files[0], "none.json"])


def test_objectives_that_differ_are_told(tmp_path: Path, capsys):
    records = load(20)
    objectives = ({"ttft": 120.0}, {"ttft": 60.0}, {})
    files = [str(tmp_path / f"{number}.json") for number in range(len(objectives))]
    for path, slo_ms in zip(files, objectives, strict=True):
        Path(path).write_text(json.dumps(document(records, summary=summary(records, slo_ms))))
    told = []
    for pair in ((0, 0), (1, 0), (2, 1), (2, 2)):
        main(["bench", "load", "--compare", *(files[number] for number in pair)])
        lines = capsys.readouterr().out.splitlines()
        told.append(
            next((line.removeprefix("goodput of both is under ") for line in lines if "goodput of" in line), "")
        )
    others = ", the objectives of A; B was measured with others"
    assert told == ["ttft 120 ms", f"ttft 60 ms{others}", "ttft 60 ms", ""]


def test_every_field_of_the_file_is_documented():
    workload = Workload("random", "", "", lengths=FixedLengths(8, 4))
    endpoint = Endpoint("http://x", "m", ("a0",), extra_body={"top_k": 1})
    asked = Load(endpoint, workload, num_requests=40, requests_per_s=5.0, arrivals="bursts")
    found = report_of(asked, Outcome(tuple(load(40, failed=2)), 0.1, 1), "prelude", {"ttft": 500.0})
    page = (Path(__file__).parents[4] / "docs" / "benchmarks.md").read_text()
    fields = [*found, *found["settings"], *found["workload"], *found["generator"], *found["summary"]]
    for name in ("goodput", "errors", "by_use"):
        fields += found["summary"][name]
    fields += [*found["summary"]["errors"]["most_frequent"][0], *found["summary"]["windows"][0], *found["requests"][0]]
    fields += found["summary"]["ttft_ms"]
    missing = [name for name in fields if f"`{name}`" not in page and name not in ("format", "benchmark")]
    assert missing == []


def test_figures_are_split_by_residency_if_the_server_says_it():
    records = load(30)
    assert summary(records, {})["by_residency"] == {}
    assert "By residency" not in load_page(document(records), records)
    tiers = ("host", "host", "store")
    told = [msgspec.structs.replace(each, residency=tiers[n % 3]) for n, each in enumerate(records[:-3])] + records[-3:]
    found = summary(told, {})["by_residency"]
    assert {tier: group["num_requests"] for tier, group in found.items()} == {"host": 18, "store": 9}
    page = load_page(document(told), told)
    assert checked(page)
    assert "By residency" in page


def test_comparisons_have_punicas_figures():
    a, b = load(60), load(60, scale=2.0, seed=2)
    found = {each.name: each for each in compare(a, b)}
    of_a = summary(a, {})
    assert found["encode/token p50"].a == pytest.approx(of_a["encode_ms_per_token"]["p50"], rel=1e-3)
    assert found["decode/token p99"].a == pytest.approx(of_a["decode_ms_per_token"]["p99"], rel=1e-3)
    assert found["prompt + output"].a == pytest.approx(of_a["total_tokens_per_s"], rel=1e-3)
    assert found["decode/token p50"].ratio == pytest.approx(2.0)
    unknown = [msgspec.structs.replace(each, prompt_tokens=None) for each in a]
    assert "encode/token p50" not in {each.name for each in compare(unknown, b)}


@pytest.mark.parametrize("kind", ["json", "html"])
def test_a_full_disk_is_told_and_the_file_with_everything_comes_first(tmp_path: Path, kind: str):
    records = load(3)
    files = {"json": tmp_path / "a.json"} | {kind: Path("/dev/full")}
    with pytest.raises(BenchError, match="/dev/full cannot be written: No space left on device"):
        write(document(records), Outcome(tuple(records), 0.1, 1), Files(**files))
    assert (tmp_path / "a.json").exists() == (kind != "json")


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
        (("--goodput", "ttft:5", "--html", "x.html"), "a sweep writes"),
        (("--goodput", "ttft:5", "--num-requests", "9"), "--num-requests with --sweep"),
    ],
)
def test_what_a_sweep_cannot_do(words: tuple[str, ...], says: str, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prelude"])
    with pytest.raises(SystemExit, match=says):
        main(["bench", "load", "--url", "http://x", "--sweep", *words])
