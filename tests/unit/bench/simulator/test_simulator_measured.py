"""Layouts of 8B on H200 hold in the simulator what they held when they were measured (bench/results)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import pytest

from bench.simulator.curves import read_curves
from bench.simulator.outcome import Slo
from bench.simulator.run import Scenario, simulate
from bench.simulator.traffic import Traffic
from bench.systems.layout import Layout

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[4] / "bench/results"
CURVES = read_curves("h200-llama-3.1-8b")
SHORT = (256, 64)  # docs/simulator.md says so
_OTHER = ("stock", "none", "fp8")  # engines or traffic of which there are no curves


def cells() -> Iterator[tuple[str, Layout, tuple[int, int], float, int, float, float]]:
    """Id, layout, lengths, milliseconds per token, steps that prompts wait, the rate that held, one that did not."""
    for path in sorted(RESULTS.glob("goodput-h200*.json")):
        if any(word in path.stem for word in _OTHER):
            continue
        document = json.loads(path.read_text())
        steps = 4 if path.stem.endswith("-wait") else 0
        if interval := re.search(r"--prefill-decode-interval (\d+)", document["command"]):
            steps = int(interval[1])
        for row in document["rows"]:
            if len(row["probes"]) < 2:
                continue
            shape, tpot_ms = (row["prompt_tokens"], row["generated_tokens"]), row["slo_ms"]["tpot"]
            failed = min(each["requests_per_s"] for each in row["probes"] if each["share"] < 0.99)
            name = f"{row['layout']}-{shape[0]}+{shape[1]}-{tpot_ms:g}ms-{path.stem}"
            yield name, Layout.parse(row["layout"]), shape, tpot_ms, steps, row["best_requests_per_s"], failed


def share(layout: Layout, shape: tuple[int, int], tpot_ms: float, steps: int, rate: float) -> float:
    """Of the requests within the objectives, the median of three seeds."""
    limits = msgspec.structs.replace(CURVES.limits, prompts_wait_steps=steps)
    curves = msgspec.structs.replace(CURVES, limits=limits)
    traffic = Traffic(rate, 35.0, 32, zipf=0.0, prompt_tokens=shape[0], output_tokens=shape[1])
    scenario = Scenario(curves, layout, traffic, host_adapters=64)
    slo = Slo(1.0, tpot_ms / 1000)
    return median(simulate(scenario, seed).summary(slo, from_s=5.0)["good_share"] for seed in (1, 2, 3))


@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell[0])
def test_a_layout_holds_what_it_held(cell: tuple) -> None:
    """Within 15 %, of the best rate that held and of the lowest that did not. More with short prompts, alone."""
    _, *about, held, failed = cell
    assert share(*about, 0.85 * held) >= 0.99
    if about[1] == SHORT and not about[3]:
        assert share(*about, 1.15 * failed) >= 0.99
    else:
        assert share(*about, 1.15 * failed) < 0.99
