"""What the soak benchmark makes of what it saw: clients, kills, memory."""

from __future__ import annotations

import pytest

from bench.errors import BenchError
from bench.soak import LEFT, Answer, Kill, Sample, summary, table
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
    assert found == {"mib": [112.5, 187.5], "max_mib": 200.0, "descriptors": [50, 50], "max_descriptors": 50}


def test_without_an_answer_before_the_first_kill_there_is_nothing_to_compare_with():
    with pytest.raises(BenchError, match="let the load last longer"):
        summary([Answer(150.0, 1.0, "answered")], KILLS, [])


def test_wrong_usage():
    with pytest.raises(SystemExit, match="--kill-every must be positive"):
        main(["bench", "soak", "--kill-every", "0"])
