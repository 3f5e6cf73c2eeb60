"""What a matrix says about its own numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.evidence import RESULTS
from bench.matrix.report import notes, repeat_spread


@pytest.fixture
def found() -> dict[str, Any]:
    """Two repeats of everything: some loads of few requests, and short ones of conversations."""
    return json.loads((RESULTS / "matrix-cpu.json").read_text())


def test_intervals_of_fewer_than_three_repeats_say_what_they_lack(found: dict[str, Any]) -> None:
    def lines(repeats: int) -> str:
        return "\n".join(notes({**found, "settings": {**found["settings"], "repeats": repeats}}))

    assert all("intervals of what varies within loads" in lines(repeats) for repeats in (1, 2))
    assert "within loads" not in lines(3)


def test_loads_of_few_requests_and_short_loads_are_counted(found: dict[str, Any]) -> None:
    for load in found["loads"]:
        load["summary"].update(duration_s=4.0, num_requests=100)
    of = {
        name: [load["summary"] for load in found["loads"] if load["cell"].startswith(name)]
        for name in ("punica", "chat")
    }
    assert "FEW" not in "\n".join(notes(found))
    assert "loads lasted 4.0 to 4.0 s, tails included; " in "\n".join(notes(found))
    for summary in of["punica"][:2]:
        summary.update(num_requests=29, duration_s=7.8)
    for summary in of["chat"]:
        summary.update(num_requests=12, duration_s=1.5)
    text = "\n".join(notes(found))
    assert "FEW: less than 30 requests in loads of punica, n = 32 (2 of 8); chat, n = 64 (8 of 8), so" in text
    assert "loads lasted 1.5 to 7.8 s, tails included, and less than 3.6 s in chat, n = 64 (8 of 8)" in text


def test_repeats_that_differ_are_said(found: dict[str, Any]) -> None:
    loads = found["loads"]
    for load in loads:
        load["summary"]["requests_per_s"] = 10.0
    of = [load["summary"] for load in loads if (load["cell"], load["system"]) == ("punica, n = 32", "pair")]
    assert len(of) == 2
    of[0]["requests_per_s"] = 8.5
    assert "repeats differ most in punica, n = 32, pair: 8.50 and 10.0 requests/s" in notes(found)
    assert repeat_spread(loads[:1]) == ""
    assert not any("repeats differ" in line for line in notes({**found, "loads": loads[:1]}))


def test_rates_that_were_given_are_said(found: dict[str, Any]) -> None:
    (line,) = (line for line in notes(found) if line.startswith("at a rate that was given"))
    assert line.endswith(": chat, n = 64 (4/s); agent, n = 16 (8/s)")
    for load in found["loads"]:
        load["settings"]["requests_per_s"] = None
    assert not any(line.startswith("at a rate") for line in notes(found))
