"""What a change is permitted by, checked in its own transaction: an upload can outlast the right to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from adapters.catalog.sql.database import Transaction
from adapters.catalog.sql.keys import key_of
from adapters.catalog.sql.tables import api_keys
from adapters.catalog.sql.tenants import digest_of_tenant, generation_of
from adapters.errors import RightWithdrawn
from adapters.scopes import Scope


@dataclass(frozen=True, slots=True)
class Right:
    """A right as of when a change began."""

    tenants: tuple[str, ...]  # who changes, and whose adapter: the deletion of either ends the right
    generations: Mapping[str, int]  # see `SqlTenants.generations`
    key_id: str | None = None
    scope: Scope = Scope.ADMIN  # that the key must have
    expires_at: datetime | None = None  # of a token


def check_right(transaction: Transaction, right: Right) -> None:
    """Raise RightWithdrawn if the right has ended."""
    connection = transaction.connection
    for tenant in right.tenants:
        if generation_of(connection, tenant) != right.generations.get(digest_of_tenant(tenant), 0):
            raise RightWithdrawn(f"the tenant {tenant!r} was deleted after this change began, so it was not made")
    if right.key_id is not None:
        _check_key(connection, right.key_id, right.scope, transaction.now)
    if right.expires_at is not None and right.expires_at <= transaction.now:
        raise RightWithdrawn(
            "the token has expired since this change began, so it was not made; send it with a new one"
        )


def _check_key(connection: Connection, key_id: str, scope: Scope, now: datetime) -> None:
    row = connection.execute(select(api_keys).where(api_keys.c.key_id == key_id)).first()
    key = None if row is None else key_of(row)
    if key is None or not key.is_usable(now):
        raise RightWithdrawn(
            f"the key {key_id} was revoked or has expired since this change began, so it was not made; use another key"
        )
    if key.scopes.isdisjoint({scope, Scope.ADMIN}):
        raise RightWithdrawn(f"the key {key_id} has lost the scope {scope} since this change began; it was not made")
