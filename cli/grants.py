"""`prelude grants add | list | remove`: what a tenant lets others do with its adapters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from adapters.identity import full_name_of, split_adapter_name
from adapters.scopes import Permission
from cli.adapters.opened import audited, opened_catalog, this_user
from cli.adapters.outcome import add_command, add_group, print_result

if TYPE_CHECKING:
    from adapters.catalog.records import Grant


def add_commands(commands: Any) -> None:
    """Add `grants` and its subcommands to the command line."""
    text = "Let a tenant use or see another tenant's adapters. Running routers see a change within a second."
    subcommands = add_group(commands, "grants", text)
    shown = add_command(subcommands, "list", _list, "List grants.")
    shown.add_argument("--tenant", help="only grants that this tenant has given or received")
    add = add_command(subcommands, "add", _add, "Add a grant.")
    remove = add_command(subcommands, "remove", _remove, "Remove a grant.")
    for command in (add, remove):
        command.add_argument(
            "what", metavar="TENANT[/NAME]", help="one adapter, or all adapters of a tenant, including future ones"
        )
        command.add_argument("--to", required=True, metavar="TENANT", help="who gets the grant")
        command.add_argument("--permission", type=Permission, choices=list(Permission), default=Permission.INFER)


def _list(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        found = catalog.grants.list(arguments.tenant)
    print_result(arguments, [_as_json(each) for each in found], map(_line, found))


def _add(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        grant = _grant_of(arguments)
        with audited(catalog, "grant.add", _line(grant)):
            is_new = catalog.grants.add(grant, by=this_user())
    print_result(arguments, _as_json(grant), [_line(grant) + ("" if is_new else "  (as before)")])


def _remove(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        grant = _grant_of(arguments)
        with audited(catalog, "grant.remove", _line(grant)):
            catalog.grants.remove(grant)
    print_result(arguments, _as_json(grant), [f"{_line(grant)}  (removed)"])


def _grant_of(arguments: argparse.Namespace) -> Grant:
    """Raises InvalidReference."""
    from adapters.catalog.records import Grant

    owner, name = arguments.what, None
    if "/" in owner:
        owner, name = split_adapter_name(owner)
    return Grant(owner, name, arguments.to, arguments.permission)


def _line(grant: Grant) -> str:
    what = f"{grant.owner}/{grant.name}" if grant.name else f"all adapters of {grant.owner}"
    return f"{grant.grantee} may {grant.permission} {what}"


def _as_json(grant: Grant) -> dict[str, Any]:
    return {
        "owner": grant.owner,
        "adapter": None if grant.name is None else full_name_of(grant.owner, grant.name),
        "grantee": grant.grantee,
        "permission": grant.permission,
    }
