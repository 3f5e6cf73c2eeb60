"""`prelude audit`: the newest changes and denials, as JSON lines."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from cli.adapters.opened import opened_catalog
from cli.adapters.outcome import failures_end, integer_to

_LIMIT = 100
_MOST = 1_000_000


def add_commands(commands: Any) -> None:
    """Add `audit` to the command line."""
    text = "Print the newest events of the audit log as JSON lines, oldest first."
    command = commands.add_parser("audit", help=text, description=text)
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--limit", type=integer_to(_MOST), default=_LIMIT, help=f"number of events; default: {_LIMIT}")
    command.add_argument("--tenant", help="only events caused by this tenant's keys and tokens")
    command.set_defaults(run=_audit, json=False)


def _audit(arguments: argparse.Namespace) -> None:
    with failures_end(arguments), opened_catalog(arguments) as catalog:
        events = catalog.audit.newest(arguments.limit, arguments.tenant)
    for event in events:
        print(msgspec.json.encode(event).decode())
