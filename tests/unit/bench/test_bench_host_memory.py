"""What the host-memory benchmark rejects, and how it reads its own loads; the cold-load test covers the cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import host_memory
from bench.errors import BenchError


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fitting": 9}, "fitting is 9, room 8"),
        ({"room": 32}, "room 32 and adapters 32"),
        ({"fitting": 0}, "fitting is 0"),
        ({"layouts": ("unified", "trio")}, "no layout trio; there are unified, pair"),
    ],
)
def test_options_that_measure_nothing_are_refused(changes: dict, text: str) -> None:
    with pytest.raises(BenchError, match=text):
        host_memory.run(replace(host_memory.Options(), **changes), "prelude", None, print)


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="there is no folder"):
        host_memory.run(host_memory.Options(), "prelude", tmp_path / "away" / "file.json", print)


def test_ratios_are_of_the_same_repeat_and_layout() -> None:
    speeds = {("unified", 6): (10.0, 20.0, 40.0), ("unified", 32): (5.0, 18.0, 30.0), ("pair", 6): (1.0, 1.0, 1.0)}
    rows = [
        {"layout": layout, "adapters": adapters, "repeat": repeat, "requests_per_s": speed, "loads": repeat}
        for (layout, adapters), each in speeds.items()
        for repeat, speed in enumerate(each)
    ]
    few, many = host_memory._medians(rows, "unified")
    assert (few["adapters"], few["ratio"], few["requests_per_s"]) == (6, 1.0, 20.0)
    assert (many["adapters"], many["ratio"], many["requests_per_s"]) == (32, 0.75, 18.0)
    assert many["loads"] == 1
