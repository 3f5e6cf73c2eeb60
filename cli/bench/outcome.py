"""How a benchmark's command shows its progress, and ends when it fails."""

import argparse
import sys
from collections.abc import Callable
from functools import partial, wraps

from bench.errors import BenchError, OptionInvalid

Run = Callable[[argparse.Namespace], None]

say = partial(print, flush=True)


def failure_ends(run: Run) -> Run:
    """Have a benchmark that fails end the command with its message. Raises ConfigError for wrong usage."""

    @wraps(run)
    def command(arguments: argparse.Namespace) -> None:
        try:
            run(arguments)
        except OptionInvalid as error:
            from cluster.errors import ConfigError  # a load generator alone needs no more of it

            raise ConfigError(str(error)) from error
        except BenchError as error:
            sys.exit(f"prelude: {error}")

    return command
