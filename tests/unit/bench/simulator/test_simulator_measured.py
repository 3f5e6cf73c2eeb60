"""The kept curves give, in the simulator, what a loop of clients got on the GPU that they are from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import msgspec
import pytest

from bench.simulator.curves import read_curves
from bench.simulator.run import Run, Scenario
from bench.simulator.traffic import Arrival, Traffic
from bench.systems.layout import Layout

RESULT = Path(__file__).parents[4] / "bench/results/adapter-tax-h200-llama-3.1-8b-rank16-unified.json"
STEP_S = 0.005  # within which a client sends its next request


@pytest.mark.parametrize(("system", "adapters"), [("none", 0), ("unified_lora", 128)])
def test_a_closed_loop_on_one_h200(system: str, adapters: int) -> None:
    document = json.loads(RESULT.read_text())
    shape, curves = document["settings"]["shape"], read_curves("h200-llama-3.1-8b")
    limits = msgspec.structs.replace(curves.limits, slots=document["settings"]["num_slots"])

    class Clients(Traffic):
        def arrivals(self, seed: int) -> Iterator[Arrival]:
            for number in range(shape["num_requests"]):
                while number - len(run.outcome.end_s) >= shape["concurrency"]:
                    run.clock.run_until(run.clock.now + STEP_S)
                adapter = number % adapters if adapters else None
                yield Arrival(run.clock.now, adapter, shape["prompt_tokens"], shape["generated_tokens"])

    curves = msgspec.structs.replace(curves, limits=limits)
    run = Run(Scenario(curves, Layout(unified=1), Clients(1.0, 1.0, adapters), host_adapters=512), 1)
    outcome = run.run()
    rates = [row["requests_per_s"] for row in document["rows"] if row["system"] == system]
    latencies = [row["median_latency_s"] for row in document["repeats"] if row["system"] == system]
    assert len(outcome.end_s) / max(outcome.end_s) == pytest.approx(fmean(rates), rel=0.1)
    lasted = (end_s - at_s for end_s, at_s in zip(outcome.end_s, outcome.at_s, strict=True))
    assert median(lasted) == pytest.approx(fmean(latencies), rel=0.1)
