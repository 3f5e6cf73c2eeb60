"""`prelude adapters import | list | show | alias | rollback | history | delete | restore | export`.

The commands access catalog and store directly, with or without a running cluster. Running routers see a change within
a second.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.catalog.described import (
    adapter_as_json,
    deletion_as_json,
    details_as_json,
    history_as_json,
    move_as_json,
    revision_as_json,
)
from adapters.catalog.records import AdapterDetails, AdapterSummary, AliasMove, AliasTarget, RevisionContent
from adapters.errors import InvalidReference
from adapters.identity import LATEST, AdapterReference, full_name_of, split_adapter_name
from cli.adapters.downloaded import adapter_directory
from cli.adapters.opened import audited, changing, opened_catalog, opened_library, this_user
from cli.adapters.outcome import add_command, integer_to, noted, print_result

if TYPE_CHECKING:
    from adapters.catalog.sql import SqlCatalog

_PAGE = 1000
_SHOWN_REVISIONS = 20
_SHOWN_MOVES = 20
_PERCENT = re.compile("[1-9][0-9]?")


def add_commands(commands: Any) -> None:
    """Add the commands of this module."""
    text = "Import a directory as the latest revision of an adapter."
    command = add_command(commands, "import", _import, text)
    _add_name(command)
    command.add_argument(
        "directory",
        help="the adapter, in a format of docs/adapter-formats.md; or hf://OWNER/REPOSITORY[@REVISION][/FOLDER]",
    )
    command.add_argument("--tag", metavar="ALIAS", help="point this alias at the revision, too")
    command.add_argument(
        "--positions",
        choices=("prefill",),
        help="apply it to the prompt only, although its files do not say that it was trained for it",
    )
    command.add_argument("--keep-latest", action="store_true", help="do not move the alias `latest` if it exists")

    command = add_command(commands, "list", _list, "List adapters by tenant and name.")
    command.add_argument("--tenant", help="only this tenant's adapters")
    command.add_argument("--prefix", help="only names with this prefix")
    command.add_argument("--deleted", action="store_true", help="list the deleted adapters that can still be restored")

    command = add_command(commands, "show", _show, "Show an adapter's aliases and its newest revisions.")
    _add_name(command)

    command = add_command(commands, "alias", _alias, "Point an alias at a revision, or split it over two.")
    command.add_argument("alias", metavar="NAME@ALIAS")
    what = "a revision's number; or an alias or sha256:…; two share the requests by percent: r7=95 r8=5"
    command.add_argument("revision", metavar="rN[=PERCENT]", nargs="+", help=what)

    command = add_command(commands, "rollback", _rollback, "Point an alias back at where it was before.")
    command.add_argument("alias", metavar="NAME[@ALIAS]", help=f"default: the alias {LATEST!r}")

    text = "Show when an alias moved, from which revision to which, and by whom; newest first."
    command = add_command(commands, "history", _history, text)
    _add_name(command)
    command.add_argument("--alias", default=LATEST, help=f"default: {LATEST!r}")
    command.add_argument(
        "--limit", type=integer_to(_PAGE), default=_SHOWN_MOVES, help=f"number of moves; default: {_SHOWN_MOVES}"
    )

    command = add_command(commands, "delete", _delete, "Delete an adapter. It can be restored until `gc` purges it.")
    _add_name(command)

    command = add_command(commands, "restore", _restore, "Restore a deleted adapter and its aliases.")
    _add_name(command)

    text = "Let all tenants that use an adapter share a prefix cache, or give each its own."
    command = add_command(commands, "prefixes", _prefixes, text)
    _add_name(command)
    choice = command.add_mutually_exclusive_group(required=True)
    choice.add_argument(
        "--shared", action="store_true", help="share it; response times can then reveal other tenants' prompts"
    )
    choice.add_argument("--own", action="store_true", help="one prefix cache per tenant, the default")

    text = "Write a revision to a new directory, in Prelude's own layout and in the serving dtype."
    command = add_command(commands, "export", _export, text)
    command.add_argument("reference", metavar="REFERENCE", help="name, name@alias, name@rN or name@sha256:…")
    command.add_argument("directory", type=Path, help="created by the export; must not exist")


def _add_name(command: Any) -> None:
    command.add_argument("name", metavar="NAME", help="`name` or `tenant/name`")


def _import(arguments: argparse.Namespace) -> None:
    tenant, name = split_adapter_name(arguments.name)
    if arguments.tag is not None:
        _check_alias(arguments.name, arguments.tag)
    with opened_library(arguments) as opened:
        library, by = opened.begun(arguments.name), this_user()
        with (
            audited(library.catalog, "adapter.import", full_name_of(tenant, name)) as note,
            adapter_directory(arguments.directory, library.limits.max_bytes) as (directory, lineage),
        ):
            revision = library.import_directory(
                arguments.name,
                directory,
                by=by,
                moves_latest=not arguments.keep_latest,
                alias=arguments.tag,
                positions=arguments.positions,
                lineage=lineage,
            )
            note["new"] = f"r{revision.number} {revision.revision_id}"
            as_json = revision_as_json(revision, library.limits.max_expert_rank)
    tagged = "" if arguments.tag is None else f", {arguments.tag}"
    line = f"{revision.full_name}@r{revision.number}{tagged}  {revision.revision_id}  {revision.bytes:,} bytes"
    notes = [f"note: workers refuse it: {as_json['not_served']}"] if as_json["not_served"] else []
    notes += [noted(each) for each in revision.warnings]
    print_result(arguments, as_json, [line, *notes])


def _list(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        found = list(_summaries(catalog, arguments.tenant, arguments.prefix, arguments.deleted))
    print_result(arguments, [adapter_as_json(each) for each in found], _table(found))


def _summaries(catalog: SqlCatalog, tenant: str | None, prefix: str | None, deleted: bool) -> Iterator[AdapterSummary]:
    after, page = None, None
    while page is None or len(page) == _PAGE:
        page = catalog.list(tenant, prefix, after, _PAGE, deleted=deleted)
        yield from page
        after = (page[-1].tenant, page[-1].name) if page else None


def _table(summaries: list[AdapterSummary]) -> Iterator[str]:
    width = max((len(each.full_name) for each in summaries), default=0)
    for each in summaries:
        deleted = f"  deleted {each.deleted_at:%Y-%m-%d %H:%M} UTC" if each.deleted_at else ""
        yield (
            f"{each.full_name:<{width}}  r{each.number:<5} {'+'.join(each.kinds):<9} {each.positions:<7} "
            f"{each.bytes:>14,} bytes  {each.revision_id[:19]}…{_notes(each)}{deleted}"
        )


def _show(arguments: argparse.Namespace) -> None:
    tenant, name = split_adapter_name(arguments.name)
    with opened_catalog(arguments) as catalog:
        details = catalog.show(tenant, name, _SHOWN_REVISIONS)
    print_result(arguments, details_as_json(details), _details_lines(details))


def _details_lines(details: AdapterDetails) -> Iterator[str]:
    summary = details.summary
    yield f"{summary.full_name}  created {summary.created_at:%Y-%m-%d %H:%M} UTC"
    yield "Aliases"
    for alias, number in details.aliases.items():
        yield f"  {alias:<20} {details.splits.get(alias, f'r{number}')}"
    hidden = details.num_revisions - len(details.revisions)
    yield f"Revisions{f', the newest {len(details.revisions)} of {details.num_revisions}' if hidden else ''}"
    for each in details.revisions:
        yield (
            f"  r{each.number:<5} {each.created_at:%Y-%m-%d %H:%M} UTC  {'+'.join(each.kinds):<9} {each.positions:<7} "
            f"{each.bytes:>14,} bytes  {each.revision_id}{_notes(each)}"
        )
        yield from (f"         {noted(warning)}" for warning in each.warnings)


def _notes(revision: RevisionContent) -> str:
    trained = "" if revision.trained_positions is None else f"  trained for {revision.trained_positions}"
    return trained if revision.stored else f"{trained}  in memory only"


def _alias(arguments: argparse.Namespace) -> None:
    full_name, _, alias = arguments.alias.partition("@")
    if not alias:
        raise InvalidReference(f"{arguments.alias!r} names no alias; write NAME@ALIAS")
    wanted = _check_alias(full_name, alias)
    with changing(arguments, "adapter.alias", f"{full_name}@{alias}") as (catalog, note):
        target = _target(catalog, full_name, arguments.revision)
        move = catalog.set_alias(wanted.tenant, wanted.name, alias, target, by=this_user())
        note |= _revisions_of(move)
    _print_move(arguments, wanted.full_name, move)


def _target(catalog: SqlCatalog, full_name: str, given: Sequence[str]) -> AliasTarget:
    """What `rN`, or `rN=PERCENT` twice, mean. Raises InvalidReference."""
    parts = [text.partition("=") for text in given]
    if len(parts) == 1 and not parts[0][1]:
        return AliasTarget(catalog.resolve(f"{full_name}@{given[0]}").number)
    for text, (_, _, percent) in zip(given, parts, strict=True):
        if not _PERCENT.fullmatch(percent):
            raise InvalidReference(f"{text[:80]!r} has no whole percent from 1 to 99 after '='; write r7=95 r8=5")
    try:
        return AliasTarget.split(
            [(catalog.resolve(f"{full_name}@{pin}").number, int(percent)) for pin, _, percent in parts]
        )
    except ValueError as error:
        raise InvalidReference(str(error)) from None


def _rollback(arguments: argparse.Namespace) -> None:
    full_name, _, alias = arguments.alias.partition("@")
    wanted = _check_alias(full_name, alias or LATEST)
    with changing(arguments, "adapter.rollback", f"{full_name}@{alias or LATEST}") as (catalog, note):
        move = catalog.rollback(wanted.tenant, wanted.name, alias or LATEST, by=this_user())
        note |= _revisions_of(move)
    _print_move(arguments, wanted.full_name, move)


def _revisions_of(move: AliasMove) -> dict[str, str | None]:
    """For the audit log."""
    return {"old": None if move.origin is None else str(move.origin), "new": str(move.target)}


def _history(arguments: argparse.Namespace) -> None:
    wanted = _check_alias(arguments.name, arguments.alias)
    with opened_catalog(arguments) as catalog:
        moves = catalog.alias_history(wanted.tenant, wanted.name, arguments.alias, arguments.limit + 1)
    as_json = history_as_json(wanted.full_name, moves, arguments.limit)
    print_result(arguments, as_json, _history_lines(wanted.full_name, moves, arguments.limit))


def _history_lines(full_name: str, moves: Sequence[AliasMove], limit: int) -> Iterator[str]:
    yield f"{full_name}@{moves[0].alias}"
    for move in moves[:limit]:
        before = "new" if move.origin is None else str(move.origin)
        by = "" if move.moved_by is None else f"  by {move.moved_by}"
        yield f"  {move.moved_at:%Y-%m-%d %H:%M:%S} UTC  {before:>6} -> {move.target!s:<6}{by}".rstrip()
    if len(moves) > limit:
        yield f"  and earlier ones; --limit shows up to {_PAGE:,}"


def _check_alias(full_name: str, alias: str) -> AdapterReference:
    split_adapter_name(full_name)
    wanted = AdapterReference.parse(f"{full_name}@{alias}")
    if wanted.alias is None:
        raise InvalidReference(f"{alias!r} names a revision, which does not move; name an alias")
    return wanted


def _print_move(arguments: argparse.Namespace, full_name: str, move: AliasMove) -> None:
    before = "new" if move.origin is None else f"was {move.origin}"
    print_result(arguments, move_as_json(full_name, move), [f"{full_name}@{move.alias} -> {move.target}  ({before})"])


def _delete(arguments: argparse.Namespace) -> None:
    tenant, name = split_adapter_name(arguments.name)
    with changing(arguments, "adapter.delete", full_name_of(tenant, name)) as (catalog, _):
        catalog.delete(tenant, name)
    line = f"{arguments.name} is deleted; `prelude adapters restore {arguments.name}` brings it back until it is purged"
    print_result(arguments, deletion_as_json(full_name_of(tenant, name), deleted=True), [line])


def _restore(arguments: argparse.Namespace) -> None:
    tenant, name = split_adapter_name(arguments.name)
    with changing(arguments, "adapter.restore", full_name_of(tenant, name)) as (catalog, _):
        catalog.restore(tenant, name)
    print_result(arguments, deletion_as_json(full_name_of(tenant, name), deleted=False), [f"{arguments.name} is back"])


def _prefixes(arguments: argparse.Namespace) -> None:
    tenant, name = split_adapter_name(arguments.name)
    full_name, shown = full_name_of(tenant, name), "shared" if arguments.shared else "own"
    with changing(arguments, "adapter.prefixes", full_name) as (catalog, note):
        catalog.grants.set_shared_prefixes(tenant, name, arguments.shared)
        note["new"] = shown
    line = (
        f"{full_name}: {'one prefix cache for all tenants' if arguments.shared else 'a prefix cache for each tenant'}"
    )
    print_result(arguments, {"object": "adapter", "name": full_name, "prefixes": shown}, [line])


def _export(arguments: argparse.Namespace) -> None:
    AdapterReference.parse(arguments.reference)
    with opened_library(arguments) as library:
        revision = library.export(arguments.reference, arguments.directory)
        dtype, max_expert_rank = library.dtype, library.limits.max_expert_rank
    line = f"{revision.full_name}@r{revision.number} is in {arguments.directory}, in {dtype} with its scales folded in"
    as_json = revision_as_json(revision, max_expert_rank) | {"directory": str(arguments.directory), "dtype": dtype}
    print_result(arguments, as_json, [line])
