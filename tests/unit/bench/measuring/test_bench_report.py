"""Tables, documents and plots of measurements."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from bench.errors import BenchError
from bench.measuring import report
from bench.measuring.report import Measurement


def measurement(system: str, adapters: int, repeat: int, rate: float, **fields) -> Measurement:
    made = Measurement(system, adapters, repeat, 100, 100 / rate, 0.25, foreign_cores=0.0, num_cached_tokens=0)
    return replace(made, **fields)


CPU = report.RATIOS["cpu"]
RATES = {
    ("none", 0): (50, 40, 60),
    ("none", 32): (50, 52, 48),
    ("stock", 32): (11, 12, 10),
    ("unified_lora", 32): (46, 45, 10),
    ("pd", 0): (20, 20, 20),
    ("pd", 64): (19, 19, 19),
}
MEASUREMENTS = [
    measurement(system, adapters, repeat, rate)
    for (system, adapters), rates in RATES.items()
    for repeat, rate in enumerate(rates)
]


def test_rows_are_medians_in_the_order_of_the_systems():
    assert report.rows_of(MEASUREMENTS[::-1]) == [
        {"system": "none", "adapters": 0, "requests_per_s": 50},
        {"system": "none", "adapters": 32, "requests_per_s": 50},
        {"system": "stock", "adapters": 32, "requests_per_s": 11},
        {"system": "unified_lora", "adapters": 32, "requests_per_s": 45},
        {"system": "pd", "adapters": 0, "requests_per_s": 20},
        {"system": "pd", "adapters": 64, "requests_per_s": 19},
    ]


def test_ratios_are_medians_of_repeats_where_both_were_measured():
    assert report.ratios_of(MEASUREMENTS, CPU) == {
        "c/a": {"32": 0.8654},  # of 46/50, 45/52 and 10/48
        "c/b": {"32": 3.75},
        "e(n)/e(0)": {"0": 1.0, "64": 0.95},
    }


def test_the_table():
    assert report.table(MEASUREMENTS, CPU, ["A footnote."]).splitlines() == [
        "requests/s, n =             0       32       64",
        "a  none                  50.0     50.0            repeats within 20% of their median",
        "b  stock                          11.0            repeats within 9% of their median",
        "c  unified_lora                   45.0            repeats within 78% of their median",
        "e  pd                    20.0              19.0   repeats within 0% of their median",
        "",
        "c/a                              0.865            goal >= 0.90 at every n",
        "c/b                              3.750            goal >= 4.00 at n = 32",
        "e(n)/e(0)               1.000             0.950   goal >= 0.97 at n = 64",
        "",
        *(f"{report.LETTERS[system]}: {report.MEANINGS[system]}" for system in ("none", "stock", "unified_lora", "pd")),
        "A footnote.",
    ]


def test_a_single_repeat_has_no_spread():
    assert "repeats within" not in report.table([MEASUREMENTS[0]], CPU, [])


def test_a_noisy_machine_is_mentioned():
    noisy = [*MEASUREMENTS[:-1], replace(MEASUREMENTS[-1], foreign_cores=0.7)]
    assert "NOT QUIET: during 1 of 18 loads" in report.table(noisy, CPU, [])
    assert "NOT QUIET" not in report.table(MEASUREMENTS, CPU, [])


def test_the_document_has_rows_facts_and_every_raw_value():
    document = json.loads(json.dumps(report.document(MEASUREMENTS, CPU, commit="abc", command="prelude bench")))
    assert document["rows"] == report.rows_of(MEASUREMENTS)
    assert (document["commit"], document["command"]) == ("abc", "prelude bench")
    assert [each["requests_per_s"] for each in document["repeats"]] == [rate for r in RATES.values() for rate in r]
    assert document["repeats"][0]["median_latency_s"] == 0.25


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot(tmp_path, suffix):
    report.draw(MEASUREMENTS, "a title", tmp_path / f"plot.{suffix}")
    start = (tmp_path / f"plot.{suffix}").read_bytes()[:60]
    assert b"PNG" in start if suffix == "png" else b"<?xml" in start


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_measurement(monkeypatch):
    report.require_plotting()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match="setup-dev"):
        report.require_plotting()
