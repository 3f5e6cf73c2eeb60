"""`prelude bench positions`. Imports of what trains wait for the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cli.bench.arguments import numbers, positive, words
from cli.bench.given_options import with_given
from cli.bench.outcome import failure_ends, say
from cli.bench.recorded import recorded_command


def add_command(benchmarks: Any) -> None:
    """Add `positions` to the benchmarks."""
    text = (
        "What adapters of all positions and of the prompt alone learn, on tasks of six kinds; and what an adapter of "
        "all positions loses when it is applied to the prompt alone, or converted."
    )
    positions = benchmarks.add_parser("positions", help=text, description=text)
    positions.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a pretrained model, with chat template"
    )
    positions.add_argument("--device", choices=("cpu", "cuda"), help="cuda: all GPUs, in bfloat16; default: cpu")
    positions.add_argument("--kinds", type=words, help="default: lora,direft")
    positions.add_argument("--ranks", type=numbers, help="16 is for all tasks, others for three; default: 4,16,64")
    positions.add_argument("--tasks", type=words, help="default: all ten")
    positions.add_argument(
        "--arms", type=words, help="default: all,all-as-prefill,prefill,prefill-more-steps,converted"
    )
    positions.add_argument(
        "--seeds", type=positive, dest="num_seeds", metavar="N", help="runs per adapter, of other rows; default: 3"
    )
    positions.add_argument(
        "--steps", type=positive, dest="num_steps", metavar="N", help="training steps per adapter; default: 40"
    )
    positions.add_argument("--batch-size", type=positive, metavar="N", help="examples per step; default: 16")
    positions.add_argument("--rows", type=positive, metavar="N", help="of each task at most so many; default: all")
    positions.add_argument("--learning-rate", type=float, help="default: the best of three by kind and positions")
    positions.add_argument("--processes", type=positive, metavar="N", help="default: one for two cores")
    positions.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, after each training")
    positions.set_defaults(run=_positions)


@failure_ends
def _positions(arguments: argparse.Namespace) -> None:
    from bench.positions.grid import Options
    from bench.positions.run import run
    from training.errors import TrainingError

    try:
        run(with_given(Options(arguments.model), arguments), recorded_command(), arguments.json, say)
    except TrainingError as error:
        sys.exit(f"prelude: {error}")
