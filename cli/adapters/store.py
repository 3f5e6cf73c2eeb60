"""`prelude adapters gc | fsck | sign`: keep the store consistent with the catalog."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cli.adapters.opened import audited, opened_library
from cli.adapters.outcome import REFUSED, add_command, print_result
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.store.fsck import Findings, FsckReport

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_S = 36500 * 86400.0
_SHOWN = 20  # of each kind of finding


def add_commands(commands: Any) -> None:
    """Add the commands of this module."""
    text = "Purge adapters that were deleted some time ago, and remove unreferenced files from the store."
    command = add_command(commands, "gc", _gc, text)
    command.add_argument(
        "--older-than",
        type=age_s,
        default="7d",
        metavar="AGE",
        help="minimum time since the deletion, such as 7d or 12h; default: 7d",
    )

    text = "Compare the store with the catalog: find missing, damaged, unreferenced and left-over objects."
    command = add_command(commands, "fsck", _fsck, text)
    command.add_argument(
        "--repair", action="store_true", help="move damaged objects to quarantine/, delete unreferenced ones"
    )
    command.add_argument("--no-content", action="store_true", help="do not read the objects' content")
    command.add_argument(
        "--min-age", type=age_s, default="1h", metavar="AGE",
        help="ignore younger objects, whose import may still run; default: 1h",
    )  # fmt: skip

    text = "Sign all objects in the store that lack this cluster's signature. Trusts the store's content."
    add_command(commands, "sign", _sign, text)


def age_s(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: a number and s, m, h or d, such as 12h")
    age = float(int(match[1]) * _UNITS_S[match[2]])
    if age > _MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is over a hundred years; give less")
    return age


def _gc(arguments: argparse.Namespace) -> None:
    with opened_library(arguments) as library, audited(library.catalog, "adapters.gc", None) as note:
        num_removed = library.collect_garbage(library.catalog.now() - timedelta(seconds=arguments.older_than))
        note["new"] = f"{num_removed} revisions removed"
    print_result(arguments, {"num_removed": num_removed}, [f"{num_removed} revisions removed"])


def _fsck(arguments: argparse.Namespace) -> None:
    with opened_library(arguments) as library:
        report = library.fsck(arguments.min_age, repair=arguments.repair, check_content=not arguments.no_content)
        url = library.store.url
    print_result(arguments, {"is_sound": report.is_sound, **asdict(report)}, _lines(url, report))
    sys.exit(0 if report.is_sound else REFUSED)


def _sign(arguments: argparse.Namespace) -> None:
    with opened_library(arguments) as library:
        if not library.store.can_sign:
            raise ConfigError("this cluster has no key; give integrity.signing_key")
        with audited(library.catalog, "adapters.sign", None) as note:
            num_signed, damaged = library.sign()
            note["new"] = f"{num_signed} objects signed"
    lines = [f"{num_signed} objects signed"]
    lines += [f"{each} is damaged and not signed; run fsck with --repair, and import it again" for each in damaged]
    print_result(arguments, {"num_signed": num_signed, "damaged": damaged}, lines)
    sys.exit(REFUSED if damaged else 0)


def _lines(url: str, report: FsckReport) -> Iterator[str]:
    sound = "is sound" if report.is_sound else "is NOT sound"
    yield f"{url} {sound}: {report.num_objects:,} revisions of {report.num_bytes:,} bytes"
    yield f"  {report.num_referenced:>9,}  are referred to"
    yield from _finding(report.missing, "are referred to and not stored; import them again")
    yield from _finding(report.corrupt, "are damaged; repair, then import them again")
    yield from _finding(report.unreferenced, "are not referred to")
    yield from _finding(report.left_over, "were left by imports that did not finish")
    if report.num_young:
        yield f"  {report.num_young:>9,}  are not referred to, but young"
    if report.num_repaired:
        yield f"  {report.num_repaired:>9,}  repaired: deleted, or moved to quarantine/"


def _finding(findings: Findings, what: str) -> Iterator[str]:
    if not findings.count:
        return
    yield f"  {findings.count:>9,}  {what}"
    for name in findings.listed[:_SHOWN]:
        yield f"             {name}"
    if findings.count > _SHOWN:
        yield f"             and {findings.count - _SHOWN:,} more; --json lists up to 1000"
