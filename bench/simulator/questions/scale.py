"""How large a fleet can be simulated."""

from __future__ import annotations

import resource
from dataclasses import replace

from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.search import bound_per_s
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools

SAMPLES = ((0.01, 5.0), (0.1, 3.0), (1.0, 1.0))  # shares of the fleet, with seconds of traffic


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
