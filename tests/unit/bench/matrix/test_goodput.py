"""The goodput benchmark on a stand-in server: what it sweeps, what it writes, what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.bench.started_systems import start_mocks
from support.bench.streaming_mock import MockServer
from support.commands import Prelude

from bench.errors import BenchError
from bench.load.options import Endpoint
from bench.load.sweep import Found, Sweep
from bench.matrix import goodput
from bench.matrix.systems import Starter
from bench.systems.layout import Layout
from cli.main import main

FIRST_S, GAP_S = 0.02, 0.004


QUICK = goodput.Options(
    systems=("prelude",), layouts=(Layout(unified=1),), adapters=2, slots=2, shapes=((16, 4),), first_rates=(8.0,),
    sweep=Sweep(share=0.9, precision=0.9, max_rate=16.0, least_probe_s=2.0, lowest=1.0),
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch) -> None:
    """Defaults with which a run ends soon."""
    monkeypatch.setattr(goodput, "Options", lambda: QUICK)


@pytest.fixture
def started(monkeypatch) -> list[Any]:
    return start_mocks(monkeypatch, lambda _name: MockServer(first_s=FIRST_S, gap_s=GAP_S))


@pytest.mark.slow
def test_each_system_is_swept_for_each_objective(started, quick, tmp_path: Path, monkeypatch, prelude: Prelude):
    words = [
        "bench", "goodput", "--systems", "none,prelude", "--layouts", "2u,1p+1d", "--objectives", "ttft:2000,tpot:1000",
        "--objectives", "tpot:1", "--first-rate", "10,12", "--duration-s", "0.6", "--adapters", "3",
        "--shapes", "8+3,9+3", "--concurrency", "5",
        "--json", str(tmp_path / "g.json"),
    ]  # fmt: skip
    shown = prelude.prints(*words)
    found = json.loads((tmp_path / "g.json").read_text())
    assert [(each["system"], each["layout"], each["prompt_tokens"], each["slo_ms"]) for each in found["rows"]] == [
        (system, layout, prompt_tokens, slo_ms)
        for system in ("none", "prelude")
        for layout in ("2u", "1p+1d")
        for prompt_tokens in (8, 9)
        for slo_ms in ({"ttft": 2000.0, "tpot": 1000.0}, {"tpot": 1.0})
    ]
    for holds, misses in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert holds["best_requests_per_s"] == 16.0  # the quick edition tries none above
        assert misses["best_requests_per_s"] is None  # the server's tokens are four milliseconds apart
        assert "no rate held the objectives" in misses["verdict"]
        # What was tried for the first objectives is judged by the second, too: only lower rates are tried anew.
        first_rate = {8: 10.0, 9: 12.0}[holds["prompt_tokens"]]
        assert [each["requests_per_s"] for each in holds["probes"]] == [first_rate, 16.0]
        assert [each["requests_per_s"] for each in misses["probes"]] == [first_rate, 16.0]
        assert [each["share"] for each in misses["probes"]] == [0.0, 0.0]
        assert holds["probes"][0]["summary"]["tpot_ms"]["p50"] >= 1000 * GAP_S * 0.9
        assert holds["max_total_tokens"] > 0
    assert found["command"].startswith("prelude bench goodput")
    assert [(each.systems, str(each.layout), each.through, each.max_adapters) for each in started] == [
        (("none",), "2u", "router", 3),
        (("none",), "1p+1d", "router", 3),
        (("unified",), "2u", "router", 3),
        (("pair",), "1p+1d", "router", 3),
    ]
    assert "no rate held the objectives" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--systems", "prelude,stock", "--layouts", "1p+1d+1u"), "only Prelude's router mixes"),
        (("--systems", "pair"), "there is no pair; there are none, stock, prelude"),
        (("--systems", "prelude,stock", "--engine-arguments=--load-format dummy"), "stock SGLang loads no adapters"),
        (("--share", "1.5"), "a share of 1.5: above 0, at most 1"),
        (("--first-rate", "200000"), "--first-rate 200000: at most 100000 here"),
        (("--first-rate", "2,3,4", "--shapes", "8+3"), "--first-rate: 3 rates for 1 shapes; give one or as many"),
        (("--precision", "1"), "--precision 1: from 0.001 to below 1"),
        (("--growth", "1"), "--growth 1: from 1.01 to 4"),  # found only when engines had started
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    started, words: tuple[str, ...], says: str, prelude: Prelude
):
    prelude.refuses("bench", "goodput", *words, says=says, status=2)
    assert not started


@pytest.mark.parametrize("text", ["", "u", "0u", "3p", "2d+1u", "1p+1p+1d", "1p+1d+", "u1", "100u", "1p+1b"])
def test_a_layout_that_cannot_be_is_refused(text: str):
    with pytest.raises(BenchError, match="layout"):
        Layout.parse(text)


def test_objectives_are_named():
    with pytest.raises(BenchError, match="each names some of ttft, tpot, e2e"):
        goodput.run(goodput.Options(objectives=({},)), "x", None, print)
    with pytest.raises(SystemExit):
        main(["bench", "goodput", "--objectives", "ttft:1000,ttft:2000"])


@pytest.mark.slow
def test_a_file_has_what_was_measured_before_a_system_failed(
    started, quick, tmp_path: Path, monkeypatch, prelude: Prelude
):
    start = Starter._start

    async def fail_second(self: Starter, *given: Any) -> Endpoint:
        if started:
            raise BenchError("the stock engine did not start")
        return await start(self, *given)

    monkeypatch.setattr(Starter, "_start", fail_second)
    words = ("bench", "goodput", "--systems", "prelude,stock", "--json", tmp_path / "g.json")
    prelude.refuses(*words, says="did not start")
    found = json.loads((tmp_path / "g.json").read_text())
    assert [each["system"] for each in found["rows"]] == ["prelude"]


@pytest.mark.slow
def test_a_system_that_fails_every_request_is_no_result(started, quick, tmp_path: Path, monkeypatch, prelude: Prelude):
    async def refuse(_server: MockServer, _request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no memory is left"}}, status=500)

    made = MockServer.__init__
    monkeypatch.setattr(MockServer, "__init__", lambda self, **given: made(self, **{"answer": refuse, **given}))
    words = ("bench", "goodput", "--json", tmp_path / "g.json")
    prelude.refuses(*words, says="prelude: every request failed: error_answer")


@pytest.mark.slow
def test_a_stop_ends_the_whole_run(started, tmp_path: Path, monkeypatch, prelude: Prelude):
    async def find(*_arguments: Any) -> Found:
        return Found(None, False, (), "stopped by Ctrl-C before the highest rate was found")

    monkeypatch.setattr(goodput, "find_highest_rate", find)
    words = ("bench", "goodput", "--systems", "prelude,stock", "--json", tmp_path / "g.json")
    prelude.refuses(*words, says="prelude: stopped by Ctrl-C")
    found = json.loads((tmp_path / "g.json").read_text())
    assert len(started) == 1
    assert found["rows"][0]["ended"].startswith("stopped")
