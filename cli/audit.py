"""`prelude audit`: the newest changes and denials, as JSON lines; `prelude catalog migrate`: the tables."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from cli.adapters.opened import opened_catalog
from cli.adapters.outcome import add_command, failures_end, print_result

_LIMIT = 100
_MOST = 1_000_000


def add_commands(commands: Any) -> None:
    """Add `audit` and `catalog` to the command line."""
    text = "Print the newest events of the audit log as JSON lines, oldest first."
    command = commands.add_parser("audit", help=text, description=text)
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--limit", type=_limit, default=_LIMIT, help=f"number of events; default: {_LIMIT}")
    command.add_argument("--tenant", help="only events caused by this tenant's keys and tokens")
    command.set_defaults(run=_audit, json=False)
    text = "Prepare the catalog's database."
    group = commands.add_parser("catalog", help=text, description=text)
    text = (
        "Create the catalog's tables, or migrate those of an earlier release. Routers and commands do the same at "
        "their start; this lets a deployment do it, or fail, before."
    )
    add_command(group.add_subparsers(required=True, metavar="command"), "migrate", _migrate, text)


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:8]) <= _MOST):
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to {_MOST} (found {text[:20]!r})")
    return int(text)


def _audit(arguments: argparse.Namespace) -> None:
    with failures_end(arguments), opened_catalog(arguments) as catalog:
        events = catalog.audit.newest(arguments.limit, arguments.tenant)
    for event in events:
        print(msgspec.json.encode(event).decode())


def _migrate(arguments: argparse.Namespace) -> None:
    with failures_end(arguments), opened_catalog(arguments):
        pass
    print_result(arguments, {"migrated": True}, ["The catalog is up to date."])
