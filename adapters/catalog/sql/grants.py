"""Grants: what tenants let others do with their adapters."""

from collections.abc import Sequence

from sqlalchemy import delete, exists, insert, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from adapters.catalog.records import Grant
from adapters.catalog.sql.database import CatalogPart, Transaction
from adapters.catalog.sql.lookup import require_adapter
from adapters.catalog.sql.tables import adapters, grants
from adapters.catalog.sql.tenants import ensure_tenant
from adapters.errors import AccessNotFound, InvalidReference
from adapters.identity import full_name_of
from adapters.scopes import Permission

_ALL = ""  # in place of an adapter's name


class SqlGrants(CatalogPart):
    """The grants of a catalog. Every method can raise CatalogUnavailable."""

    def add(self, grant: Grant, *, by: str | None) -> bool:
        """Add a grant; False if there is the same one. Either tenant may be new.

        Raises AdapterNotFound for an adapter that does not exist, and InvalidReference for a tenant's name.
        """
        if grant.owner == grant.grantee:
            raise InvalidReference(f"{grant.owner!r} has its own adapters anyway; name another tenant")

        def add(transaction: Transaction) -> bool:
            connection = transaction.connection
            ensure_tenant(transaction, grant.owner)
            ensure_tenant(transaction, grant.grantee)
            if grant.name is not None:
                require_adapter(connection, grant.owner, grant.name)
            if connection.execute(select(grants.c.owner).where(_is(grant))).first() is not None:
                return False
            row = {"owner": grant.owner, "name": grant.name or _ALL, "grantee": grant.grantee}
            more = {"permission": grant.permission, "created_at": transaction.now, "created_by": by}
            connection.execute(insert(grants), row | more)
            transaction.change("grants")
            return True

        return self._database.write(add)

    def remove(self, grant: Grant) -> None:
        """Take a grant back. Raises AccessNotFound."""

        def remove(transaction: Transaction) -> None:
            found = transaction.connection.execute(delete(grants).where(_is(grant)).returning(grants.c.owner)).first()
            if found is None:
                what = full_name_of(grant.owner, grant.name) if grant.name else f"all adapters of {grant.owner}"
                raise AccessNotFound(f"{grant.grantee!r} has no grant to {grant.permission} {what}")
            transaction.change("grants")

        self._database.write(remove)

    def list(self, tenant: str | None = None) -> Sequence[Grant]:
        """All grants, or those that a tenant has given or received."""
        query = select(grants).order_by(grants.c.owner, grants.c.name, grants.c.grantee, grants.c.permission)
        if tenant is not None:
            query = query.where(or_(grants.c.owner == tenant, grants.c.grantee == tenant))
        return self._database.read(
            lambda connection: [
                Grant(row.owner, row.name or None, row.grantee, Permission(row.permission))
                for row in connection.execute(query)
            ]
        )

    def set_shared_prefixes(self, tenant: str, name: str, shared: bool) -> None:
        """Have all tenants that use an adapter share one prefix cache, or each its own. Raises AdapterNotFound."""

        def change(transaction: Transaction) -> None:
            adapter_id = require_adapter(transaction.connection, tenant, name)
            row = update(adapters).where(adapters.c.id == adapter_id).values(shares_prefixes=shared)
            transaction.connection.execute(row)
            transaction.change("sharing", adapter_id)

        self._database.write(change)


def visible_to(tenant: str, permission: Permission | None) -> ColumnElement[bool]:
    """The condition that an adapter is the tenant's own, or that the tenant has a grant for it (None: no grants)."""
    if permission is None:
        return adapters.c.tenant == tenant
    granted = exists().where(
        grants.c.owner == adapters.c.tenant,
        grants.c.grantee == tenant,
        grants.c.permission == permission,
        or_(grants.c.name == _ALL, grants.c.name == adapters.c.name),
    )
    return or_(adapters.c.tenant == tenant, granted)


def _is(grant: Grant) -> ColumnElement[bool]:
    return (
        (grants.c.owner == grant.owner)
        & (grants.c.name == (grant.name or _ALL))
        & (grants.c.grantee == grant.grantee)
        & (grants.c.permission == grant.permission)
    )
