"""`prelude bench training`, `prelude bench rank-transfer` and `prelude bench positions`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.bench.arguments import numbers, positive, words
from cli.bench.given_options import with_given
from cli.bench.outcome import failure_ends, say
from cli.bench.recorded import recorded_command


def add_commands(benchmarks: Any) -> None:
    """Add them to `prelude bench`."""
    text = "Speed of training: DPO with shared prompts against pairs, SFT against peft's LoRA."
    training = benchmarks.add_parser("training", help=text, description=text)
    training.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    training.add_argument("--model", help="small, qwen2.5-0.5b or llama-3.1-8b; default: small, on a GPU llama-3.1-8b")
    training.add_argument("--profiles", type=words, help="data sets whose lengths to use; default: all six")
    training.add_argument("--layouts", type=words, help="default: shared,paired,padded")
    training.add_argument("--row-tokens", type=positive, metavar="N", help="default: 4096, on a GPU 8192")
    training.add_argument(
        "--rows", type=positive, dest="num_rows", metavar="N", help="rows per measurement; default: 1, on a GPU 2"
    )
    training.add_argument("--repeats", type=positive, metavar="N", help="default: 3")
    training.add_argument("--rank", type=positive, metavar="N", help="LoRA rank; default: 16")
    training.add_argument(
        "--limit-s", type=positive, metavar="S", help="skip measurements that have not started after S seconds"
    )
    training.add_argument("--quick", action="store_true", help="a smoke test: one profile, one row, one repeat")
    training.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    training.set_defaults(run=_training)
    text = "Does the best learning rate stay the same from rank 1 to 32? Trains many small adapters."
    transfer = benchmarks.add_parser("rank-transfer", help=text, description=text)
    transfer.add_argument("--kinds", type=words, help="default: lora,direft,loreft")
    transfer.add_argument(
        "--steps", type=positive, dest="num_steps", metavar="N", help="training steps per adapter; default: 60"
    )
    transfer.add_argument("--seeds", type=positive, metavar="N", help="runs per adapter; default: 1")
    transfer.add_argument("--processes", type=positive, metavar="N", help="default: one per core")
    transfer.add_argument("--device", choices=("cpu", "cuda"), help="device for pretraining the model; default: cpu")
    transfer.add_argument("--quick", action="store_true", help="a smoke test: four adapters, three steps each")
    transfer.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    transfer.add_argument("--plot", type=Path, metavar="FILE", help="draw a plot, .png or .svg")
    transfer.set_defaults(run=_rank_transfer)
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
    positions.add_argument("--time-limit-s", type=positive, metavar="S", help="end after so long with what is there")
    positions.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, after each training")
    positions.add_argument("--resume", action="store_true", help="train only what --json lacks")
    positions.set_defaults(run=_positions)


@failure_ends
def _training(arguments: argparse.Namespace) -> None:
    from bench.training import speed

    base = speed.GPU if arguments.device == "cuda" else speed.Options()
    if arguments.quick:
        base = replace(base, profiles=("capybara",), num_rows=1, repeats=1, row_tokens=1024, long_row=None)
    speed.run(with_given(base, arguments), recorded_command(), arguments.json, say)


@failure_ends
def _rank_transfer(arguments: argparse.Namespace) -> None:
    from bench.measuring.output import require_folders
    from bench.measuring.report import require_plotting
    from bench.training import rank_transfer

    options = with_given(rank_transfer.QUICK if arguments.quick else rank_transfer.Options(), arguments)
    require_folders(arguments.plot)
    if arguments.plot:
        require_plotting()
    document = rank_transfer.run(options, recorded_command(), arguments.json, say)
    if arguments.plot:
        rank_transfer.draw(document, arguments.plot)


@failure_ends
def _positions(arguments: argparse.Namespace) -> None:
    from bench.training.positions.grid import Options
    from bench.training.positions.run import run
    from training.errors import TrainingError

    try:
        run(with_given(Options(arguments.model), arguments), recorded_command(), arguments.json, say)
    except TrainingError as error:
        sys.exit(f"prelude: {error}")
