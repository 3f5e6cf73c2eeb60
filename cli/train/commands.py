"""`prelude train sft | dpo | eval`: train adapters that are applied to the prompt only, and evaluate them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cli.train import evaluate, options
from cli.train.outcome import failures_end

if TYPE_CHECKING:
    from training.loop.training import Evaluated, Outcome
    from training.runs.run import Prepared, RunOptions

_EPILOG = (
    "Exit status: 0 when training is done, 1 if it failed, 2 on wrong usage, 130 or 143 if a signal stopped it; then "
    "--resume continues."
)


def add_commands(commands: Any) -> None:
    """Add `train` and its subcommands to the command line."""
    text = "Train adapters on JSONL files, and evaluate them. Needs the extra `train`."
    group = commands.add_parser("train", help=text, description=text)
    subcommands = group.add_subparsers(required=True, metavar="command")
    for name, text in (
        ("sft", "Train an adapter on prompts with their answers."),
        ("dpo", "Train an adapter on prompts with a chosen and a rejected answer."),
    ):
        command = subcommands.add_parser(name, help=text, description=text, epilog=_EPILOG)
        options.add_options(command, is_preference=name == "dpo")
        command.set_defaults(run=_train, objective=name)
    evaluate.add_command(subcommands)


def _train(arguments: argparse.Namespace) -> None:
    with failures_end():
        from training.loop.progress import ProgressLog
        from training.runs.run import prepared

        chosen = options.run_options(arguments)
        with prepared(
            chosen, logs=lambda num_steps: [ProgressLog(num_steps)], evaluated=_push(arguments)
        ) as ready, _signals_stop() as stop:  # fmt: skip
            print(_beginning(ready), file=sys.stderr)
            outcome = ready.training.run(lambda: bool(stop))
        _end(chosen, outcome, stop)


def _push(arguments: argparse.Namespace) -> Evaluated | None:
    """Pushes each evaluated checkpoint, if --push is given. A push that fails is reported, and training continues."""
    if arguments.push is None:
        return None
    from training.errors import PushFailed
    from training.runs.push import PushTarget

    alias = arguments.push_alias or "latest"
    target = PushTarget(arguments.router, arguments.push, os.environ.get(options.KEY_VARIABLE), alias)

    def push(step: int, _metrics: Mapping[str, float], folder: Path) -> None:
        try:
            answer = target.push(folder)
        except PushFailed as error:
            print(f"prelude: step {step} was not pushed: {error}", file=sys.stderr)
        else:
            print(f"step {step} is {target.name}@{target.alias} r{answer.get('number')}", file=sys.stderr)

    return push


def _beginning(ready: Prepared) -> str:
    left_out = f", {ready.num_too_long} over-long ones left out" if ready.num_too_long else ""
    at = f", continued at step {ready.training.step}" if ready.training.step else ""
    return (
        f"{ready.num_examples} examples{left_out}, {ready.num_parameters:,} parameters, {ready.training.num_steps} "
        f"steps{at}"
    )


def _end(chosen: RunOptions, outcome: Outcome, stop: list[int]) -> None:
    if not outcome.is_done:
        print(f"stopped after step {outcome.step} of {outcome.num_steps}; --resume continues", file=sys.stderr)
        sys.exit(128 + stop[0])
    kept = chosen.output / ("last" if outcome.best_step is None else "best")
    if outcome.best_step is not None:
        print(f"evaluation loss {outcome.best_loss:.4f} at step {outcome.best_step}, the lowest: {kept}")
    print(f"trained {outcome.num_steps} steps. Next: prelude adapters import NAME {kept}")


@contextmanager
def _signals_stop() -> Iterator[list[int]]:
    """Inside, the first SIGINT or SIGTERM is noted in the list; the second one acts as ever."""
    received: list[int] = []
    earlier: dict[signal.Signals, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        print("stopping after this step", file=sys.stderr)
        for each, handler in earlier.items():
            signal.signal(each, handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        earlier[each] = signal.signal(each, note)
    try:
        yield received
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)
