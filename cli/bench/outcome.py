"""How a benchmark's command shows its progress, and ends when it fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial, wraps

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
