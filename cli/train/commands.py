"""`prelude train sft | dpo | eval`: train adapters that are applied to the prompt only, and evaluate them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cli.libraries import needing
from cli.train import evaluate, options

if TYPE_CHECKING:
    from training.loop.training import Outcome
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
    with needing():
        from training.loop.progress import ProgressLog
        from training.runs.base import choose_threads
        from training.runs.run import prepared

        chosen = options.run_options(arguments)
        print(f"reading {chosen.model} and {', '.join(map(str, chosen.data))}", file=sys.stderr)
        pushes = None if arguments.push is None else _Pushes(arguments)
        with (
            prepared(chosen, logs=lambda num_steps: [ProgressLog(num_steps)], evaluated=pushes) as ready,
            _signals_stop() as stop,
        ):
            print(_beginning(ready), file=sys.stderr)
            choose_threads(ready.base)
            outcome = ready.training.run(_Watch(ready.training.num_steps - ready.training.step, stop))
        _end(chosen, outcome, stop)
        if pushes is not None and not pushes.is_done:
            sys.exit(1)


class _Pushes:
    """Pushes each evaluated checkpoint. A push that fails is reported, and training continues.

    Raises PushFailed at once, before any training, if the router cannot be pushed to.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        from training.runs.push import PushTarget

        key, alias = os.environ.get(options.KEY_VARIABLE), arguments.push_alias or "latest"
        self._target = PushTarget(arguments.router, arguments.push, key, alias)
        self._target.check()
        self.is_done = False  # the last one

    def __call__(self, step: int, _metrics: Mapping[str, float], folder: Path) -> None:
        from training.errors import PushFailed

        try:
            answer = self._target.push(folder)
        except PushFailed as error:
            self.is_done = False
            print(f"prelude: step {step} was not pushed: {error}", file=sys.stderr)
        else:
            self.is_done = True
            name = f"{self._target.name}@{self._target.alias}"
            print(f"step {step} is {name} r{answer.get('number')}", file=sys.stderr)


class _Watch:
    """Asked between two steps whether to stop; says after the first one how long all of them take."""

    def __init__(self, num_steps: int, stop: list[int]) -> None:
        self._left, self._stop = num_steps, stop
        self._started_at: float | None = None
        self._has_told = False

    def __call__(self) -> bool:
        if self._started_at is None:
            self._started_at = time.monotonic()
        elif not self._has_told:
            self._has_told = True
            took_s = time.monotonic() - self._started_at
            print(f"the first step took {took_s:.1f} s, all may take {took_s * self._left:.0f} s", file=sys.stderr)
        return bool(self._stop)


def _beginning(ready: Prepared) -> str:
    left_out = f", {ready.num_too_long} over-long ones left out" if ready.num_too_long else ""
    at = f", continued at step {ready.training.step}" if ready.training.step else ""
    training, parameters = ready.training, ready.model.adapter.num_parameters
    return (
        f"{ready.num_examples} examples{left_out}, {parameters:,} parameters, {training.num_steps} steps in "
        f"{training.num_epochs:.3g} epochs{at}"
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
