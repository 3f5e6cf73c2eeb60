"""What the chaos benchmark aims at, and how it counts what clients saw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench import chaos
from bench.chaos import LATE, PROBE, QUICK, Options, Seen, _Chaos, _targets, faults, summary
from bench.errors import SystemFailed
from bench.measuring.process_use import Use
from bench.systems.shaken_cluster import Answer, Kind, _in_use
from cli.main import main

ROW = {
    "layout": "unified",
    "victim": "unified-0 server",
    "signal": "stop",
    "in_flight": 2,
    "phases": {"relaying": {"event worker_lost": 1}, "ensuring_adapter": {"answered": 1}},
    "outcomes": {"event worker_lost": 1, "answered": 1},
    "longest_s": 12.4,
    "probe_outcomes": {"answered": 20},
    "longest_probe_s": 3.0,
    "ready_s": 40.2,
    "is_ready": True,
    "wrong_answers": 0,
    "hung": 0,
    "unsent_failed": 0,
    "left_behind": [],
}


def test_every_process_of_each_role_is_a_target() -> None:
    parts = ("agent", "server", "scheduler", "detokenizer")
    of_pair = [("", "router"), *(("prefill-0", part) for part in parts), *(("decode-0", part) for part in parts)]
    assert _targets("pair", Options()) == of_pair
    assert _targets("unified", Options()) == [("", "router"), *(("unified-0", part) for part in parts)]
    assert _targets("unified", QUICK) == [("unified-0", "scheduler")]


def test_outcomes_by_phase_and_what_failed_before_its_first_byte() -> None:
    seen = Seen()
    seen.add(Answer("answered", "x", "a", began_at=1.0, first_byte_at=2.0, ended_at=3.0), 10.0)
    seen.add(Answer("event worker_lost", "x", "b", began_at=1.0, first_byte_at=9.0, ended_at=14.0), 10.0)
    seen.add(Answer("answered", "x", "c", began_at=9.0, first_byte_at=15.0, ended_at=16.0), 10.0)
    seen.add(Answer("502 worker_lost", "", "d", began_at=9.0, ended_at=11.0), 10.0)
    seen.add(Answer("connection broken", "", "", began_at=9.0, ended_at=11.0), 10.0)
    seen.add(Answer("wrong answer", "y", "e", began_at=12.0, first_byte_at=13.0, ended_at=30.0), 10.0)
    assert seen.longest_s == 18.0
    assert seen.failed_unsent(10.0) == 2
    found = seen.by_phase({"b": "relaying", "c": "ensuring_adapter", "d": "waiting_first_event"})
    assert found == {
        "ended": {"answered": 1, "wrong answer": 1},
        "ensuring_adapter": {"answered": 1},
        "relaying": {"event worker_lost": 1},
        "unknown": {"connection broken": 1},
        "waiting_first_event": {"502 worker_lost": 1},
    }


def test_the_summary_has_what_must_not_be() -> None:
    assert faults(summary([ROW])) == []
    bad = {**ROW, "wrong_answers": 1, "hung": 2, "unsent_failed": 3, "left_behind": ["1 request"], "is_ready": False}
    assert faults(summary([ROW, bad])) == [
        "1 wrong answers", "2 hung", "3 unsent failed", "1 left behind", "1 not ready"
    ]  # fmt: skip
    for excused in ({"layout": "pair"}, {"victim": "router"}):  # nobody else can answer
        assert summary([{**ROW, "unsent_failed": 3, **excused}])["unsent_failed"] == 0


def test_every_queue_of_an_engine_is_looked_at() -> None:
    load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 7, "gen_throughput": 1.5}
    queues = {"waiting": 0, "grammar": 1}
    kv = {"mode": "prefill", "prefill_inflight_queue_reqs": 2, "kv_transfer_latency_ms": 3.0}
    found = _in_use({**load, "queues": queues, "disaggregation": kv})
    assert found == {"num_used_tokens": 7, "grammar": 1, "prefill_inflight_queue_reqs": 2}
    assert _in_use({**load, "num_used_tokens": 0, "queues": None}) == {}


class Shaken:
    """A cluster that answers at once, until its process gets the signal: then it fails whom it has not begun with."""

    def __init__(self, text_after: str = "") -> None:
        self.is_shaken = False
        self.num_looks = 0
        self.asked: list[tuple[int, Kind]] = []
        self._text_after = text_after
        self._shaken = asyncio.Event()

    def process(self, worker: str, part: str) -> Any:
        return self

    def is_running(self, worker: str, part: str) -> bool:
        """From the second look after the signal on."""
        self.num_looks += 1
        return self.num_looks > 1

    def send_signal(self, number: int) -> None:
        self.is_shaken = True
        self._shaken.set()

    def status(self) -> str:
        return "zombie"

    def uses(self) -> dict[str, Use]:
        return {"router": Use(1, 10.0, 20)}

    def count_what_is_kept(self) -> None:
        pass

    async def phases(self, num_waiting: int) -> dict[str, str]:
        await asyncio.sleep(0)
        return {"r": "waiting_first_event"}

    async def until_ready(self) -> None:
        pass

    async def is_ready(self) -> bool:
        return True

    async def left_behind(self) -> list[str]:
        return []

    async def ask(self, adapter: int, kind: Kind, started: asyncio.Event | None = None) -> Answer:
        self.asked.append((adapter, kind))
        began_at = asyncio.get_running_loop().time()
        if started is not None and kind is LATE:
            await self._shaken.wait()
            return Answer("502 worker_lost", "", "r", began_at, ended_at=began_at + 1)
        if started is not None:
            started.set()
        text = f"{adapter} {kind}" + (self._text_after if self.is_shaken else "")
        return Answer("answered", text, "q", began_at, began_at, began_at + 1)


def test_a_case_has_streams_and_later_requests_for_new_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos.asyncio, "sleep", _no_sleep)
    for text_after, num_wrong in (("", 0), ("!", 2)):
        row, asked = asyncio.run(_one_case(text_after))
        assert row["outcomes"] == {"answered": 4, "502 worker_lost": 4}
        assert row["phases"] == {"ended": {"answered": 4}, "waiting_first_event": {"502 worker_lost": 4}}
        assert (row["wrong_answers"], row["unsent_failed"], row["is_ready"]) == (num_wrong, 4, True)
        assert [adapter for adapter, kind in asked if kind is LATE][-4:] == [4, 5, 6, 7]
        assert asked[-2:] == [(0, PROBE), (1, PROBE)]  # until the process has been replaced


_sleep = asyncio.sleep


async def _no_sleep(_seconds: float) -> None:
    await _sleep(0)


async def _one_case(text_after: str) -> tuple[dict[str, Any], list[tuple[int, Kind]]]:
    system = Shaken(text_after)
    runner = _Chaos(Options(in_flight=(8,)), system)  # type: ignore[arg-type]
    await runner.learn_answers()
    return await runner.case("unified-0", "server", "kill", 8), system.asked


def test_a_run_that_fails_leaves_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def rows(*_arguments: Any):
        yield ROW
        raise SystemFailed("the cluster was not ready again within 600 s")

    monkeypatch.setattr(chaos, "_rows", rows)
    path = tmp_path / "chaos-cpu.json"
    with pytest.raises(SystemFailed):
        chaos.run(Options(), "prelude bench chaos", path, lambda line: None)
    document = json.loads(path.read_text())
    assert document["rows"] == [ROW]
    assert document["summary"]["cases"] == 1
    assert document["ended"] == "early: the cluster was not ready again within 600 s"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--signals", "kill,nuke"], "there is no nuke; there are kill, stop"),
        (["--parts", "gpu"], "there is no gpu"),
        (["--layout", "triple"], "--layout: there is no triple; there are pair, pairs, unified"),
        (["--in-flight", "many"], "is no list of numbers"),
    ],
)
def test_wrong_usage(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chaos", *words])
    assert says in f"{ended.value.code} {capsys.readouterr().err}"
