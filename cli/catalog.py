"""`prelude catalog migrate | backup | restore`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cli.adapters.opened import audited, opened_catalog, opened_library
from cli.adapters.outcome import add_command, add_group, print_result
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.backup.backup import Outcome
    from adapters.backup.folder import BackupFolder
    from adapters.library import AdapterLibrary


def add_commands(commands: Any) -> None:
    """Add `catalog` to the command line."""
    text = "Prepare the catalog's database; back it up and restore it, with the adapters' files."
    subcommands = add_group(commands, "catalog", text)
    text = (
        "Create the catalog's tables, or migrate those of an earlier release. Routers and commands do the same at "
        "their start; this lets a deployment do it, or fail, before."
    )
    add_command(subcommands, "migrate", _migrate, text)

    text = "Back up the catalog, and the files that the backup lacks. Routers may serve and write."
    command = add_command(subcommands, "backup", _backup, text)
    command.add_argument("to", metavar="TO", help="a folder, new or of earlier backups, or s3://BUCKET/PREFIX")
    command.add_argument("--catalog-only", action="store_true", help="no files: the store has its own backup")

    text = "Restore a backup into an empty catalog and the store, after it was verified. Stop routers before."
    command = add_command(subcommands, "restore", _restore, text)
    command.add_argument("origin", metavar="FROM", help="the folder of the backup, or s3://BUCKET/PREFIX")
    command.add_argument("--catalog", metavar="NAME", default="", help="as `backup` printed it; default: the newest")
    command.add_argument("--allow-missing", action="store_true", help="restore although files are missing or damaged")


def _migrate(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments):
        pass
    print_result(arguments, {"migrated": True}, ["The catalog is up to date."])


def _backup(arguments: argparse.Namespace) -> None:
    from adapters.backup.backup import back_up

    with (
        _opened(arguments, arguments.to, is_new=True) as (library, folder),
        audited(library.catalog, "catalog.backup", folder.url) as note,
    ):
        outcome = back_up(library.catalog, library.store, folder, catalog_only=arguments.catalog_only)
        note["new"] = outcome.catalog
    print_result(arguments, asdict(outcome), _lines(outcome, "copied"))


def _restore(arguments: argparse.Namespace) -> None:
    from adapters.backup.backup import restore

    with _opened(arguments, arguments.origin, is_new=False) as (library, folder):
        outcome = restore(
            folder, library.catalog, library.store, arguments.catalog, allow_missing=arguments.allow_missing
        )
        with audited(library.catalog, "catalog.restore", folder.url) as note:  # no refusal fills the catalog
            note["new"] = outcome.catalog
    print_result(arguments, asdict(outcome), _lines(outcome, "restored"))


@contextmanager
def _opened(
    arguments: argparse.Namespace, place: str, *, is_new: bool
) -> Iterator[tuple[AdapterLibrary, BackupFolder]]:
    from adapters.backup.folder import BackupFolder

    try:
        with opened_library(arguments) as library:
            yield library, BackupFolder(place, is_new=is_new)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _lines(outcome: Outcome, done: str) -> Iterator[str]:
    yield f"{outcome.catalog}: {outcome.num_revisions:,} revisions, {outcome.num_copied:,} {done}"
    if outcome.lacking:
        yield f"{len(outcome.lacking):,} are missing or damaged; `prelude adapters fsck` lists them: import them again"
    if outcome.num_unsigned:
        yield f"{outcome.num_unsigned:,} lack this cluster's signature; if you trust them: `prelude adapters sign`"
