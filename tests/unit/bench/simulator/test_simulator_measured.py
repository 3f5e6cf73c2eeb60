"""The kept curves give, in the simulator, what a loop of clients got on the GPU that they are from."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

import msgspec
import pytest

from bench.simulator.curves import read_curves
from bench.simulator.planned import H200_8B
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools, Scenario
from bench.simulator.traffic import ClosedLoop

RESULT = Path(__file__).parents[4] / "bench/results/adapter-tax-h200-llama-3.1-8b-rank16-unified.json"


@pytest.mark.parametrize(("system", "adapters"), [("none", 0), ("unified_lora", 128)])
def test_a_closed_loop_on_one_h200(system: str, adapters: int) -> None:
    document = json.loads(RESULT.read_text())
    shape, curves = document["settings"]["shape"], read_curves(H200_8B)
    limits = msgspec.structs.replace(curves.limits, slots=document["settings"]["num_slots"])
    loop = ClosedLoop(
        shape["concurrency"], shape["num_requests"], shape["prompt_tokens"], shape["generated_tokens"], adapters
    )
    curves = msgspec.structs.replace(curves, limits=limits)
    outcome = simulate(Scenario(curves, Pools(unified=1), loop, host_adapters=512))
    rates = [row["requests_per_s"] for row in document["rows"] if row["system"] == system]
    latencies = [row["median_latency_s"] for row in document["repeats"] if row["system"] == system]
    assert len(outcome.end_s) / max(outcome.end_s) == pytest.approx(fmean(rates), rel=0.1)
    lasted = (end_s - at_s for end_s, at_s in zip(outcome.end_s, outcome.at_s, strict=True))
    assert median(lasted) == pytest.approx(fmean(latencies), rel=0.1)
