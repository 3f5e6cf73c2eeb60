"""`prelude bench simulate`: layouts of a simulated cluster. Imports of the simulator wait for the run."""

import argparse
from typing import Any

from cli.bench.arguments import add_json, recorded_command, say, with_given


def add_command(benchmarks: Any) -> None:
    """Add `simulate` to the benchmarks."""
    text = (
        "Simulate every layout of so many GPUs, from measured engine speeds and with the router's own placement: the "
        "highest rate of each within the objectives."
    )
    simulate = benchmarks.add_parser("simulate", help=text, description=text)
    simulate.add_argument(
        "--curves", help="a name below bench/simulator/measured/, or a file; default: h200-llama-3.1-8b"
    )
    traffic = simulate.add_argument_group("traffic")
    traffic.add_argument("--prompt-tokens", type=int, help="mean prompt length; default: 2048")
    traffic.add_argument("--output-tokens", type=int, help="mean answer length; default: 128")
    traffic.add_argument("--length-cv", type=float, help="standard deviation over mean; default: 0.5")
    traffic.add_argument("--adapters", type=int, dest="num_adapters", help="default: 2000")
    traffic.add_argument("--zipf", type=float, help="exponent of their popularity; default: 1")
    traffic.add_argument("--base-share", type=float, help="share of requests without an adapter; default: 0.1")
    traffic.add_argument("--seconds", type=float, help="measured duration; default: 20")
    traffic.add_argument("--seed", type=int, help="default: 1")
    cluster = simulate.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, help="GPUs of each layout; default: 8")
    cluster.add_argument(
        "--layouts", type=_layouts, metavar="LAYOUT,…",
        help="these instead, such as 2u,3p+1d: counts of prefill (p), decode (d) and unified (u) workers",
    )  # fmt: skip
    cluster.add_argument("--host-adapters", type=int, help="adapters that fit in a worker's host memory; default: 500")
    cluster.add_argument(
        "--routers", type=int, help="number of routers, each of which knows its own requests; default: 2"
    )
    slo = simulate.add_argument_group("objectives")
    slo.add_argument("--ttft", type=float, dest="ttft_ms", metavar="MS", help="default: 1000")
    slo.add_argument("--tpot", type=float, dest="tpot_ms", metavar="MS", help="default: 30")
    slo.add_argument("--share", type=float, help="share of requests that must meet both; default: 0.99")
    add_json(simulate)
    simulate.set_defaults(run=_simulate)


def _layouts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _simulate(arguments: argparse.Namespace) -> None:
    from bench.simulator import layouts
    from bench.simulator.options import Options

    layouts.run(with_given(Options(), arguments), recorded_command(), arguments.json, say)
