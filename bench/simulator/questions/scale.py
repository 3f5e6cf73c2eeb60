"""How large a fleet can be simulated, and how far the kept curves reproduce what was measured."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.search import bound_per_s
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools, Scenario
from bench.simulator.traffic import ClosedLoop

RESULTS = Path(__file__).parents[2] / "results"
SAMPLES = ((0.01, 5.0), (0.1, 3.0), (1.0, 1.0))  # shares of the fleet, with seconds of traffic
MEASURED = "adapter-tax-h200-llama-3.1-8b-rank16-unified.json"


def scale(options: Options, say: Say) -> list[Row]:
    """A thousand workers, a million adapters and 10^5 requests/s; for comparison a tenth and a hundredth of them."""
    rows = []
    asked = replace(options, prompt_tokens=128, output_tokens=32, length_cv=0.5, host_adapters=2000, base_share=0.0)
    for share, seconds in SAMPLES:
        workers, adapters = round(1000 * share), round(1_000_000 * share)
        sampled = replace(
            asked, num_adapters=adapters, seconds=seconds, warm_up_s=1.0, routers=max(1, round(10 * share))
        )
        pools = Pools(unified=workers)
        rate = min(100_000 * share, 0.8 * bound_per_s(sampled, pools))
        outcome = simulate(sampled.scenario(pools, rate), sampled.seed)
        row = {
            "share_of_fleet": share,
            "workers": workers,
            "adapters": adapters,
            "requests_per_s": round(rate),
            "events": outcome.num_events,
            "cpu_s": round(outcome.cpu_s, 2),
            "requests_per_cpu_s": round(outcome.num_arrived / outcome.cpu_s),
            "events_per_cpu_s": round(outcome.num_events / outcome.cpu_s),
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            **sampled.figures(outcome),
        }
        rows.append(row)
        say(
            f"  {workers} workers, {adapters:,} adapters, {row['requests_per_s']:,}/s: "
            f"{row['requests_per_cpu_s']:,} requests and {row['events_per_cpu_s']:,} events per CPU second"
        )
    return rows


def measured(options: Options, say: Say) -> list[Row]:
    """The closed loop of `prelude bench adapter-tax` on one H200, simulated."""
    document = json.loads((RESULTS / MEASURED).read_text())
    shape = document["settings"]["shape"]
    curves = replace(options, curves="h200-llama-3.1-8b", slots=document["settings"]["num_slots"]).worker
    rows = []
    for system, adapters in (("none", 0), ("unified_lora", 128)):
        loop = ClosedLoop(
            shape["concurrency"], shape["num_requests"], shape["prompt_tokens"], shape["generated_tokens"], adapters
        )
        outcome = simulate(Scenario(curves, Pools(unified=1), loop, host_adapters=512), options.seed)
        rates = [row["requests_per_s"] for row in document["rows"] if row["system"] == system]
        latencies = [row["median_latency_s"] for row in document["repeats"] if row["system"] == system]
        rate = len(outcome.end_s) / max(outcome.end_s)
        latency_s = float(np.median(np.array(outcome.end_s) - np.array(outcome.at_s)))
        row = {
            "system": system,
            "simulated_requests_per_s": round(rate, 2),
            "measured_requests_per_s": round(float(np.mean(rates)), 2),
            "rate_ratio": round(rate / float(np.mean(rates)), 3),
            "simulated_latency_s": round(latency_s, 3),
            "measured_latency_s": round(float(np.mean(latencies)), 3),
            "latency_ratio": round(latency_s / float(np.mean(latencies)), 3),
        }
        rows.append(row)
        say(
            f"  {system}: {rate:.1f}/s simulated, {row['measured_requests_per_s']:.1f}/s measured "
            f"({row['rate_ratio']:.2f}); median latency {row['latency_ratio']:.2f} of the measured"
        )
    return rows
