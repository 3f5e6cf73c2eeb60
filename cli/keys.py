"""`prelude keys create | list | revoke`: API keys, in the catalog. Running routers see a change within a second."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from adapters.errors import InvalidReference
from adapters.scopes import Scope, parse_scope
from cli.adapters.opened import audited, opened_catalog, this_user
from cli.adapters.outcome import add_command, add_group, print_result
from cli.adapters.store import age_s
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.catalog.records import ApiKey


def add_commands(commands: Any) -> None:
    """Add `keys` and its subcommands to the command line."""
    text = "Create, list and revoke API keys."
    subcommands = add_group(commands, "keys", text)

    text = "Create a key and print it, once. The catalog stores only its digest."
    create = add_command(subcommands, "create", _create, text)
    create.add_argument("name", metavar="NAME", help="what the key is for; shown in lists and logs")
    create.add_argument("--tenant", required=True, help="the key's tenant; a tenant is created with its first key")
    create.add_argument(
        "--scopes",
        type=_scopes,
        default=frozenset({Scope.INFER}),
        metavar="SCOPE,…",
        help=f"any of {', '.join(Scope)}; default: {Scope.INFER}",
    )
    create.add_argument("--expires", type=age_s, metavar="AGE", help="lifetime, such as 90d or 12h; default: unlimited")

    text = "List keys without their secrets, including revoked and expired ones."
    shown = add_command(subcommands, "list", _list, text)
    shown.add_argument("--tenant", help="only this tenant's keys")

    revoke = add_command(subcommands, "revoke", _revoke, "Revoke a key permanently.")
    revoke.add_argument("key_id", metavar="KEY_ID", help="as `list` shows it")


def _scopes(text: str) -> frozenset[Scope]:
    try:
        return frozenset(parse_scope(each.strip()) for each in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _create(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        tenant, name, scopes = arguments.tenant, arguments.name, arguments.scopes
        with audited(catalog, "key.create", f"{tenant} {name}") as note:
            try:
                expires_at = None if arguments.expires is None else catalog.now() + timedelta(seconds=arguments.expires)
                record, key = catalog.keys.create(tenant, name, scopes, expires_at=expires_at, by=this_user())
            except InvalidReference:  # the tenant's name, which has an error of its own
                raise
            except ValueError as error:
                raise ConfigError(str(error)) from None
            note["new"] = record.key_id
    if not arguments.json:
        print(f"{_line(record)}\nThe key, which is shown this once:", file=sys.stderr)
    print_result(arguments, {**_as_json(record), "key": key}, [key])


def _list(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog:
        found = catalog.keys.list(arguments.tenant)
    print_result(arguments, [_as_json(each) for each in found], map(_line, found))


def _revoke(arguments: argparse.Namespace) -> None:
    with opened_catalog(arguments) as catalog, audited(catalog, "key.revoke", arguments.key_id):
        record = catalog.keys.revoke(arguments.key_id)
    print_result(arguments, _as_json(record), [_line(record)])


def _line(key: ApiKey) -> str:
    ends = [f"  {what} {at:%Y-%m-%d %H:%M} UTC" for what, at in _ends(key) if at is not None]
    return f"{key.key_id}  {key.tenant}  {key.name}  {','.join(sorted(key.scopes))}{''.join(ends)}"


def _ends(key: ApiKey) -> list[tuple[str, Any]]:
    return [("expires", key.expires_at), ("revoked", key.revoked_at)]


def _as_json(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "created_by": key.created_by,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }
