"""`prelude adapters …`: verify directories, manage a cluster's adapters, control their residency."""

from __future__ import annotations

from typing import Any

from cli.adapters import catalog as adapters_catalog
from cli.adapters import convert as adapters_convert
from cli.adapters import store as adapters_store
from cli.adapters import verify as adapters_verify
from cli.adapters import workers as adapters_workers


def add_commands(commands: Any) -> None:
    """Add `adapters` and its subcommands to the command line."""
    text = "Verify and convert adapter directories, manage revisions and aliases, load and pin them on workers."
    group = commands.add_parser("adapters", help=text, description=text)
    subcommands = group.add_subparsers(required=True, metavar="command")
    for module in (adapters_verify, adapters_convert, adapters_catalog, adapters_store, adapters_workers):
        module.add_commands(subcommands)
