"""How a benchmark's command shows its progress, and ends when it fails."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial, wraps

from cli.bench.given_options import with_given
from cli.bench.recorded import recorded_command

Run = Callable[[argparse.Namespace], None]

say = partial(print, flush=True)


def failure_ends(run: Run) -> Run:
    """Have a benchmark that fails end the command with its message."""

    @wraps(run)
    def command(arguments: argparse.Namespace) -> None:
        from bench.errors import BenchError

        try:
            run(arguments)
        except BenchError as error:
            sys.exit(f"prelude: {error}")

    return command


def run_of(module: str) -> Run:
    """A command that runs a benchmark by its module's `Options`, or `QUICK`, with what the command line says."""

    @failure_ends
    def command(arguments: argparse.Namespace) -> None:
        benchmark = importlib.import_module(module)  # benchmarks take long to import
        options = with_given(benchmark.QUICK if arguments.quick else benchmark.Options(), arguments)
        benchmark.run(options, recorded_command(), arguments.json, say)

    return command
