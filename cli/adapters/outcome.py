"""Common options, output and exit statuses of the `prelude adapters` commands."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from adapters.catalog.usage import InvalidQuery
from adapters.errors import AdapterError, BaseModelInvalid, InvalidReference
from adapters.formats.lineage import BEGINNINGS as LINEAGE
from cluster.errors import ConfigError

REFUSED = 1
WRONG_USAGE = 2


def add_group(commands: Any, name: str, text: str) -> Any:
    """Add a command that has subcommands; returns where those are added."""
    group = commands.add_parser(name, help=text, description=text)
    return group.add_subparsers(required=True, metavar="command")


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> Any:
    """Add a command with the common options, whose failures end as `failures_end` has it."""
    command = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog="Exit status: 0 on success, 1 if refused or failed, 2 on wrong usage.",
    )
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--json", action="store_true", help="print JSON")

    def ended(arguments: argparse.Namespace) -> None:
        with failures_end(arguments):
            run(arguments)

    command.set_defaults(run=ended)
    return command


def integer_to(most: int) -> Callable[[str], int]:
    """The type of an argument: from 1 to `most`."""

    def parsed(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"must be an integer from 1 to {most} (found {text[:20]!r})")
        return int(text)

    return parsed


@contextmanager
def failures_end(arguments: argparse.Namespace) -> Iterator[None]:
    """Exit with 2 on wrong usage in the block, with 1 on a refusal or failure."""
    try:
        yield
    except (ConfigError, FileExistsError) as error:
        fail(arguments, WRONG_USAGE, "wrong_usage", str(error))
    except (InvalidReference, BaseModelInvalid, InvalidQuery) as error:
        fail(arguments, WRONG_USAGE, error.code, str(error))
    except AdapterError as error:
        fail(arguments, REFUSED, error.code, str(error))
    except BrokenPipeError:
        raise
    except OSError as error:  # such as a full disk, or a folder that this user may not write
        fail(arguments, REFUSED, "system_error", str(error) or type(error).__name__)


def fail(arguments: argparse.Namespace, status: int, code: str, message: str, **fields: Any) -> NoReturn:
    """Print the error and exit with the status. `fields` are added to the JSON."""
    if arguments.json:
        _print_json({**fields, "error": {"code": code, "message": message}})
    print(f"prelude: {code}: {message}", file=sys.stderr)
    sys.exit(status)


def noted(text: str) -> str:
    """What was noted about a revision at its import, with what it is before it."""
    return f"{'lineage' if text.startswith(LINEAGE) else 'warning'}: {text}"


def print_result(arguments: argparse.Namespace, as_json: Any, lines: Iterable[str]) -> None:
    """Print JSON or lines, as the arguments request."""
    if arguments.json:
        _print_json(as_json)
        return
    for line in lines:
        print(line)


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
