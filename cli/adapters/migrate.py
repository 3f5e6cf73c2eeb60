"""`prelude catalog migrate`: create or migrate the catalog's tables, before routers do so at their start."""

from __future__ import annotations

import argparse
from typing import Any

from cli.adapters.opened import opened_catalog
from cli.adapters.outcome import add_command, failures_end, print_result


def add_commands(commands: Any) -> None:
    """Add `catalog` and its subcommand to the command line."""
    text = "Prepare the catalog's database."
    group = commands.add_parser("catalog", help=text, description=text)
    subcommands = group.add_subparsers(required=True, metavar="command")
    text = (
        "Create the catalog's tables, or migrate those of an earlier release. Routers and commands do the same at "
        "their start; this lets a deployment do it, or fail, before."
    )
    add_command(subcommands, "migrate", _migrate, text)


def _migrate(arguments: argparse.Namespace) -> None:
    with failures_end(arguments), opened_catalog(arguments):
        pass
    print_result(arguments, {"migrated": True}, ["The catalog is up to date."])
