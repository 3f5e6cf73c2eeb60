"""What a matrix makes of its loads, and what it says about its own numbers."""

import json
from typing import Any

import pytest

from bench.evidence import RESULTS
from bench.load.record import Record
from bench.load.summary import summary
from bench.matrix.options import Options
from bench.matrix.report import notes
from bench.matrix.results import Measured, document

SLO_MS = {"ttft": 150.0}


def measured(system: str, repeat: int, rate: float, first_s: float = 0.1) -> Measured:
    """Ten requests in a load of this rate, each of five tokens."""
    records = [
        Record(
            number, 0, number / rate, number / rate, (number + 1) / rate, None, (number / rate + first_s,), 20, None, 5
        )
        for number in range(10)
    ]
    found = {"summary": summary(records, SLO_MS), "settings": {}, "workload": {}, "generator": {"cpu_share": 0.0}}
    return Measured("c, n = 1", system, repeat, found, 0.0)


def test_figures_are_means_and_ratios_are_of_the_loads_of_one_repeat():
    options = Options((), ("none", "stock", "unified"), SLO_MS, 1.0)
    loads = [(4.0, 8.0), (2.0, 2.0)]  # requests/s of both repeats: stock and unified
    found = document({}, options, [measured(*each) for repeat, (stock, own) in enumerate(loads) for each in
                                   (("stock", repeat, stock), ("unified", repeat, own, 0.2))])  # fmt: skip
    figures = {(each["system"], each["name"]): each for each in found["figures"]}
    assert figures["stock", "answered"] == {
        "cell": "c, n = 1", "system": "stock", "name": "answered", "unit": "requests/s", "value": 3.0, "low": 2.0,
        "high": 4.0,
    }  # fmt: skip
    assert figures["unified", "TTFT p50"]["value"] == pytest.approx(200)
    assert (figures["stock", "goodput"]["value"], figures["unified", "goodput"]["value"]) == (3.0, 0.0)
    ratios = {each["name"]: each for each in found["ratios"]}
    assert {(each["system"], each["to"]) for each in found["ratios"]} == {("unified", "stock")}
    assert (ratios["answered"]["ratio"], ratios["answered"]["low"], ratios["answered"]["high"]) == (1.6667, 1.0, 2.0)
    # A load that was not made yet has no ratio, and without the system that ratios are to, the first one is that.
    early = document({}, options, [measured("none", 0, 1.0), measured("unified", 0, 2.0), measured("none", 1, 9.0)])
    assert {(each["to"], each["name"]): each["ratio"] for each in early["ratios"]}["none", "answered"] == 2.0


def test_what_makes_numbers_doubtful_is_said():
    found: dict[str, Any] = json.loads((RESULTS / "matrix-cpu.json").read_text())
    for load in found["loads"]:
        load["summary"]["num_requests"], load["foreign_cores"] = 100, 0.0
    assert not any(word in "\n".join(notes(found)) for word in ("FEW", "NOT QUIET"))
    punica = [load for load in found["loads"] if load["cell"].startswith("punica")]
    for load in punica[:2]:
        load["summary"]["num_requests"], load["foreign_cores"] = 29, 0.5
    text = "\n".join(notes(found))
    assert "FEW: less than 30 requests in loads of punica, n = 32 (2), so" in text
    assert f"NOT QUIET: during 2 of {len(found['loads'])} loads" in text
