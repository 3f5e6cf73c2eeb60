"""`prelude bench simulate`: questions to a simulated cluster. Imports of the simulator wait for the run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cli.bench.arguments import recorded_command, with_given
from cli.bench.outcome import failure_ends, say

# A copy, since `prelude --help` should not import the simulator; a test compares them.
QUESTIONS = ("rack", "ratios", "roles", "scale")


def add_command(benchmarks: Any) -> None:
    """Add `simulate` to the benchmarks."""
    text = (
        "Simulate clusters from measured engine speeds with the router's own placement: lost racks, "
        "pairs against unified workers, roles that change, large fleets."
    )
    simulate = benchmarks.add_parser("simulate", help=text, description=text)
    simulate.add_argument(
        "--questions", type=_questions, default=QUESTIONS, help=f"default: all, which are {','.join(QUESTIONS)}"
    )
    simulate.add_argument(
        "--curves", help="a name below bench/simulator/curves/, or a file; default: h200-llama-3.1-8b"
    )
    traffic = simulate.add_argument_group("traffic")
    traffic.add_argument("--rate", type=float, dest="requests_per_s", help="requests per second; default: 100")
    traffic.add_argument("--prompt-tokens", type=int, help="mean prompt length; default: 2048")
    traffic.add_argument("--output-tokens", type=int, help="mean answer length; default: 128")
    traffic.add_argument("--length-cv", type=float, help="standard deviation over mean; default: 0.5")
    traffic.add_argument("--adapters", type=int, dest="num_adapters", help="default: 2000")
    traffic.add_argument("--zipf", type=float, help="exponent of their popularity; default: 1")
    traffic.add_argument("--base-share", type=float, help="share of requests without an adapter; default: 0.1")
    traffic.add_argument("--seconds", type=float, help="measured duration; default: 20")
    traffic.add_argument("--seed", type=int, help="default: 1")
    cluster = simulate.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, help="GPUs per layout in comparisons; default: 8")
    cluster.add_argument("--host-adapters", type=int, help="adapters that fit in a worker's host memory; default: 500")
    cluster.add_argument("--slots", type=int, help="adapter slots; default: those of the curves")
    cluster.add_argument(
        "--routers", type=int, help="number of routers, each of which knows its own requests; default: 2"
    )
    slo = simulate.add_argument_group("objectives")
    slo.add_argument("--ttft", type=float, dest="ttft_ms", metavar="MS", help="default: 1000")
    slo.add_argument("--tpot", type=float, dest="tpot_ms", metavar="MS", help="default: 30")
    slo.add_argument("--share", type=float, help="share of requests that must meet both; default: 0.99")
    simulate.add_argument("--quick", action="store_true", help="a smoke test: few requests")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    simulate.set_defaults(run=_simulate)


@failure_ends
def _simulate(arguments: argparse.Namespace) -> None:
    from bench.simulator.questions import report
    from bench.simulator.questions.options import Options

    options = with_given(Options(), arguments)
    if arguments.quick:
        options = report.quick(options)
    report.run(arguments.questions, options, recorded_command(), arguments.json, say)


def _questions(text: str) -> tuple[str, ...]:
    asked = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(asked) - set(QUESTIONS):
        raise argparse.ArgumentTypeError(f"no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    return asked
