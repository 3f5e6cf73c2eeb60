"""`prelude usage`: tokens by tenant, key and adapter, for billing."""

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from adapters.catalog.usage import GROUPS, UsageQuery
from cli.adapters.opened import opened_catalog
from cli.adapters.outcome import add_command, print_result


def add_commands(commands: Any) -> None:
    """Add `usage` to the command line."""
    text = "Print how many tokens tenants have used, by whole hours in UTC; by default in this month."
    command = add_command(commands, "usage", _usage, text)
    command.add_argument("--from", metavar="TIME", help="as 2026-01-31 or 2026-01-31T13:00Z; default: this month")
    command.add_argument("--to", metavar="TIME", help="the end, not included; default: with this hour")
    command.add_argument("--group-by", metavar="NAMES", help=f"of {','.join(GROUPS)}; default: tenant")
    command.add_argument("--tenant", help="only this one")


def _usage(arguments: argparse.Namespace) -> None:
    names = ("from", "to", "group_by", "tenant")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    query = UsageQuery.parse(given, datetime.now(UTC))
    with opened_catalog(arguments) as catalog:
        sums = catalog.usage.sums(query)
    print_result(arguments, {**query.described, "data": sums}, _table(sums) if sums else ["nothing was used then"])


def _table(sums: list[dict[str, Any]]) -> Iterator[str]:
    rows = [list(sums[0]), *(["-" if value is None else _shown(value) for value in each.values()] for each in sums)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()


def _shown(value: Any) -> str:
    return f"{value:%Y-%m-%dT%H:%MZ}" if isinstance(value, datetime) else str(value)
