"""`prelude audit`: the newest changes and denials, as JSON lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from cli.adapters.opened import opened_catalog
from cli.adapters.outcome import failures_end
from cluster.errors import ConfigError

_LIMIT = 100
_MOST = 1_000_000
_SHOWN_DAMAGED = 10


def add_command(commands: Any) -> None:
    """Add `audit` to the command line."""
    text = "Print the newest events of the audit log as JSON lines, oldest first."
    command = commands.add_parser("audit", help=text, description=text)
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--limit", type=_limit, default=_LIMIT, help=f"number of events; default: {_LIMIT}")
    command.add_argument("--tenant", help="only events caused by this tenant's keys and tokens")
    command.set_defaults(run=_audit, json=False)


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:8]) <= _MOST):
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to {_MOST} (found {text[:20]!r})")
    return int(text)


def _audit(arguments: argparse.Namespace) -> None:
    from adapters.audit_file import AuditFile
    from cluster.config.load import load_cluster_config

    with failures_end(arguments):
        file = load_cluster_config(arguments.config).audit.file
        damaged: list[int] = []
        try:
            if file is not None:
                events = AuditFile(file).newest(arguments.limit, arguments.tenant, damaged.append)
            else:
                with opened_catalog(arguments) as catalog:
                    events = catalog.audit.newest(arguments.limit, arguments.tenant)
        except OSError as error:
            raise ConfigError(f"{arguments.config}: audit.file: {file} cannot be read: {error}") from error
    if damaged:
        shown = ", ".join(map(str, damaged[:_SHOWN_DAMAGED])) + (", …" if len(damaged) > _SHOWN_DAMAGED else "")
        print(
            f"prelude: {file}: skipped what is no event, perhaps cut by a full disk, in line {shown}", file=sys.stderr
        )
    for event in events:
        print(msgspec.json.encode(event).decode())
