"""What all `prelude adapters` commands share: their common options, how they print and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from adapters.errors import AdapterError, BaseModelInvalid, InvalidReference
from cluster.errors import ConfigError

REFUSED = 1
WRONG_USAGE = 2


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> Any:
    """A command on a cluster's adapters, with the options that all of them have."""
    command = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog="Exits with 0 when it is done, 1 when it is refused or fails, 2 on wrong usage.",
    )
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
    return command


@contextmanager
def failures_end(arguments: argparse.Namespace) -> Iterator[None]:
    """Inside, what the user did wrong ends the command with 2, and what is refused or fails, with 1."""
    try:
        yield
    except (ConfigError, FileExistsError) as error:
        fail(arguments, WRONG_USAGE, "wrong_usage", str(error))
    except (InvalidReference, BaseModelInvalid) as error:
        fail(arguments, WRONG_USAGE, error.code, str(error))
    except AdapterError as error:
        fail(arguments, REFUSED, error.code, str(error))


def fail(arguments: argparse.Namespace, status: int, code: str, message: str, **fields: Any) -> NoReturn:
    """Say why and end with the status. `fields` are of the JSON."""
    if arguments.json:
        _print_json({**fields, "error": {"code": code, "message": message}})
    print(f"prelude: {code}: {message}", file=sys.stderr)
    sys.exit(status)


def print_result(arguments: argparse.Namespace, as_json: Any, lines: Iterable[str]) -> None:
    """Print the one or the other."""
    if arguments.json:
        _print_json(as_json)
        return
    for line in lines:
        print(line)


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
