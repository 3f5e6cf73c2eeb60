"""What the soak benchmark makes of what it saw: clients, kills, memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import soak
from bench.errors import BenchError, SystemFailed
from bench.soak import LEFT, Answer, Kill, Options, Sample, _Soak, summary, table
from cli.main import main

KILLS = [Kill(100.0, "router"), Kill(200.0, "unified-0 agent")]
QUIET = [Answer(float(n), 1.0, "answered") for n in range(300)]


def seen(*answers: Answer, samples: tuple[Sample, ...] = ()) -> dict:
    others = [each for each in QUIET if each.began_s not in {answer.began_s for answer in answers}]
    return summary([*others, *answers], KILLS, [*samples])


def test_a_quiet_run_is_back_at_once():
    found = seen(Answer(150.0, 0.2, LEFT))
    assert found["p99_before_s"] == 1.0
    assert [kill["is_back"] for kill in found["kills"]] == [True, True]
    assert [kill["last_slow_or_failed_s"] for kill in found["kills"]] == [0.0, 0.0]
    assert (found["outcomes"], found["wrong_answers"]) == ({"answered": 299, LEFT: 1}, 0)
    assert "unified-0 agent" in table({**found, "left_behind": []})


def test_what_is_slow_soon_after_a_kill_is_forgiven_and_later_it_is_not():
    found = seen(Answer(110.0, 25.0, "answered"), Answer(112.0, 1.0, "connection broken"))
    assert found["kills"][0]["is_back"] is True
    assert found["kills"][0]["last_slow_or_failed_s"] == 12.0
    assert found["kills"][0]["failed"] == {"connection broken": 1}
    assert seen(Answer(99.0, 2.0, "event worker_lost"))["kills"][0]["failed"] == {"event worker_lost": 1}
    assert seen(Answer(140.0, 25.0, "answered"))["kills"][0]["is_back"] is False
    assert seen(Answer(140.0, 1.0, "wrong answer"))["kills"][0]["is_back"] is False
    assert seen(Answer(140.0, 1.0, "wrong answer"))["wrong_answers"] == 1


def test_memory_is_compared_between_the_quarters():
    samples = [Sample(float(n), "router", 100.0 + n, 50) for n in range(101)]
    found = seen(samples=(*samples,))["processes"]["router"]
    life = found.pop("longest_life")
    assert found == {"mib": [112.5, 187.5], "max_mib": 200.0, "descriptors": [50, 50], "max_descriptors": 50}
    assert life == {"seconds": 100, "mib": [134.0, 191.0], "descriptors": [50, 50]}


def test_growth_is_that_of_one_life():
    """Between the quarters there may be a kill, which hides it."""
    lives = [
        Sample(float(at), "router", 100.0 + at % 400 / 10, 50 + at % 400 // 10, pid=at // 400) for at in range(900)
    ]
    found = seen(samples=(*lives,))["processes"]["router"]
    assert found["longest_life"]["seconds"] == 399
    first, last = found["longest_life"]["mib"]
    assert last - first > 20
    assert found["longest_life"]["descriptors"][1] > found["longest_life"]["descriptors"][0] + 20


def test_an_early_end_leaves_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def measure(_options, _folder, write, _progress):
        write({"capacity": 10.5})
        raise SystemFailed("there is no process left to kill")

    monkeypatch.setattr(soak, "_measure", measure)
    with pytest.raises(SystemFailed):
        soak.run(soak.QUICK, "prelude bench soak", tmp_path / "soak.json", lambda line: None)
    document = json.loads((tmp_path / "soak.json").read_text())
    assert (document["capacity"], document["ended"]) == (10.5, "early: there is no process left to kill")


def test_without_an_answer_before_the_first_kill_there_is_nothing_to_compare_with():
    with pytest.raises(BenchError, match="let the load last longer"):
        summary([Answer(150.0, 1.0, "answered")], KILLS, [])


def test_wrong_usage():
    with pytest.raises(SystemExit, match="--kill-every must be positive"):
        main(["bench", "soak", "--kill-every", "0"])


class PretendedCluster:
    """Answers at once, from the 40th request on wrongly for one adapter. It has no processes."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def ask(self, adapter: int, _kind: Any) -> SimpleNamespace:
        self.asked.append(adapter)
        await asyncio.sleep(0)
        is_wrong = adapter == 1 and len(self.asked) > 40
        return SimpleNamespace(outcome="answered", text="wrong" if is_wrong else f"text {adapter}")

    def uses(self) -> dict[str, Any]:
        return {}

    def process(self, _worker: str, _part: str) -> None:
        raise SystemFailed("there is none")


def test_requests_arrive_at_the_rate_and_answers_are_compared():
    options = Options(minutes=0.01, adapters=3, capacity_requests=20, clients=4, aborted=0.0)
    cluster = PretendedCluster()

    async def run() -> dict[str, Any]:
        soak = _Soak(options, cluster, lambda _found: None)
        await soak.learn_answers()
        assert await soak.capacity() > 0
        assert len(cluster.asked) == 3 + 20
        await soak.load(200.0, lambda _line: None)
        return soak.summary()

    found = asyncio.run(run())
    assert 80 < sum(found["outcomes"].values()) < 160  # 120 expected
    assert found["outcomes"]["wrong answer"] == found["wrong_answers"] > 0
    assert found["kills"] == []


def test_a_soak_that_finds_nothing_to_kill_ends():
    options = Options(minutes=60.0, kill_every_s=0.01, adapters=1, aborted=0.0)

    async def run() -> None:
        soak = _Soak(options, PretendedCluster(), lambda _found: None)
        await soak.learn_answers()
        await soak.load(100.0, lambda _line: None)

    with pytest.raises(SystemFailed, match="no process left to kill"):
        asyncio.run(run())


def test_those_whom_the_next_kill_hits_are_not_the_last_ones():
    before_the_next, next_kill_s = KILLS[0].at_s + 45.0, KILLS[1].at_s
    hit = Answer(next_kill_s - 1.5, 2.0, "event worker_lost")
    found = seen(hit)["kills"]
    assert found[0]["is_back"] is True
    assert found[1]["failed"] == {"event worker_lost": 1}
    assert seen(Answer(before_the_next, 1.0, "event worker_lost"))["kills"][0]["is_back"] is False
