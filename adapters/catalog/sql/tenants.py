"""Tenants, as rows that keys, grants and adapters refer to."""

from __future__ import annotations

from sqlalchemy import insert, select

from adapters.catalog.sql.database import Transaction
from adapters.catalog.sql.tables import tenants
from adapters.errors import InvalidReference
from adapters.identity import is_tenant_name


def ensure_tenant(transaction: Transaction, tenant: str) -> bool:
    """Insert the tenant's row; False if there is one already. Raises InvalidReference."""
    if not is_tenant_name(tenant):
        raise InvalidReference(
            f"{tenant[:80]!r} is not a tenant's name: 1 to 63 letters, digits, '.', '_' or '-', the first of them a "
            "letter or digit, all in ASCII"
        )
    connection = transaction.connection
    if connection.execute(select(tenants.c.name).where(tenants.c.name == tenant)).first() is not None:
        return False
    connection.execute(insert(tenants), {"name": tenant, "created_at": transaction.now})
    return True
