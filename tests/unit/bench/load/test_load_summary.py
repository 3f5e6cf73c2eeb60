"""Figures: from intended times, of good answers only, with every failure counted."""

import io

import pytest

from bench.errors import BenchError
from bench.load.process import Progress
from bench.load.record import TIMED_OUT, TRUNCATED, UNREACHABLE, Record
from bench.load.summary import meets, summary
from bench.load.terminal import ProgressLine, table


def record(number: int, first_s: float = 0.1, gap_s: float = 0.01, tokens: int = 3, **fields) -> Record:
    at_s = float(number)
    token_s = tuple(at_s + first_s + each * gap_s for each in range(tokens))
    values = {
        "session": number,
        "turn": 0,
        "intended_s": at_s,
        "sent_s": at_s + 0.002,
        "end_s": (token_s or (at_s + first_s,))[-1],
        "token_s": token_s,
        "prompt_tokens": 50,
        "output_tokens": tokens,
        "max_tokens": tokens,
    }
    return Record(**{**values, **fields})


def test_figures_of_good_requests():
    found = summary([record(number, first_s=0.1 * (number + 1)) for number in range(10)], {})
    assert found["ttft_ms"] == {"mean": 550.0, "p50": 500.0, "p90": 900.0, "p99": 1000.0, "max": 1000.0}
    assert found["itl_ms"]["p99"] == pytest.approx(10.0)
    assert found["tpot_ms"]["p50"] == pytest.approx(10.0)
    assert found["send_lag_ms"]["max"] == pytest.approx(2.0)
    assert found["duration_s"] == pytest.approx(10.02)
    assert found["total_tokens_per_s"] == pytest.approx(530 / 10.02, abs=0.01)
    assert found["goodput"] is None


def test_failures_are_in_no_latency_and_in_every_count():
    good = [record(number) for number in range(8)]
    bad = [
        record(8, first_s=60.0, tokens=1, error=TIMED_OUT, detail="no end within 60 s"),
        record(9, first_s=0.0, tokens=0, error=UNREACHABLE, detail="refused"),
    ]
    alone, both = summary(good, {"ttft": 1000.0}), summary(good + bad, {"ttft": 1000.0})
    assert both["ttft_ms"] == alone["ttft_ms"]
    assert (both["num_requests"], both["num_good"], both["num_failed"]) == (10, 8, 2)
    assert both["errors"]["by_kind"] == {UNREACHABLE: 1, TIMED_OUT: 1}
    assert (alone["goodput"]["share"], both["goodput"]["share"]) == (1.0, 0.8)
    text = table(both)
    assert text.startswith("2 of 10 requests FAILED: 1 unreachable, 1 timed_out")
    assert "1 x timed_out: no end within 60 s" in text
    assert "FAILED" not in table(alone)


def test_objectives():
    fast = record(0, first_s=0.1, gap_s=0.01)
    assert meets(fast, {"ttft": 101.0, "tpot": 11.0, "e2e": 121.0})
    assert not meets(fast, {"ttft": 99.0})
    assert not meets(fast, {"tpot": 9.0})
    assert not meets(fast, {"e2e": 119.0})
    assert meets(record(0, tokens=1), {"tpot": 1.0})
    assert not meets(record(0, error=TRUNCATED), {})


def test_short_answers_are_counted():
    found = summary([record(0, max_tokens=5), record(1)], {})
    assert found["num_short"] == 1
    assert "1 answers were shorter" in table(found)


def test_no_request_is_an_error():
    with pytest.raises(BenchError, match="no request was due"):
        summary([], {})


def test_a_late_generator_is_said():
    late = [record(number, sent_s=number + 0.5, first_s=0.6) for number in range(3)]
    assert "left 500 ms late" in table(summary(late, {}))
    assert "late or later" not in table(summary([record(0)], {}))


def test_a_line_every_ten_seconds_has_the_rates_since_the_one_before():
    times = iter([0.0, 5.0, 10.0, 19.0, 20.0])
    out = io.StringIO()
    line = ProgressLine(out, 100, lambda: next(times))
    line(Progress(10, 0, 4, 100))
    line(Progress(20, 0, 4, 500))
    line(Progress(40, 2, 4, 900))
    line(Progress(50, 2, 4, 1500))
    assert out.getvalue().splitlines() == [
        "   10 s  20/100 requests  2.0/s  50 tokens/s  4 in flight",
        "   20 s  50/100 requests  3.0/s  100 tokens/s  4 in flight  2 FAILED",
    ]
