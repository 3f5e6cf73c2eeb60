"""How much of its quota a tenant's adapters take. What is deleted counts until it is collected as garbage."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from adapters.catalog.sql.tables import adapter_revisions, adapters, revisions
from adapters.errors import TenantFull


@dataclass(frozen=True, slots=True)
class TenantRoom:
    """The most that a tenant may have in the catalog. None: no limit."""

    adapters: int | None = None
    revisions: int | None = None
    bytes: int | None = None  # of revisions; those of several adapters count once


def check_room(connection: Connection, tenant: str, room: TenantRoom) -> None:
    """Raise TenantFull if the tenant has more than it may."""
    own = (adapters.c.tenant == tenant) & adapters.c.purged_at.is_(None)
    ids = select(adapters.c.id).where(own)
    contents = select(adapter_revisions.c.content_id).where(adapter_revisions.c.adapter_id.in_(ids)).distinct()
    counts = (
        ("adapters", room.adapters, select(func.count()).select_from(adapters).where(own)),
        (
            "revisions",
            room.revisions,
            select(func.count()).select_from(adapter_revisions).where(adapter_revisions.c.adapter_id.in_(ids)),
        ),
        (
            "bytes of revisions",
            room.bytes,
            select(func.coalesce(func.sum(revisions.c.bytes), 0)).where(revisions.c.id.in_(contents)),
        ),
    )
    for what, most, query in counts:
        if most is not None and (found := connection.execute(query).scalar_one()) > most:
            raise TenantFull(
                f"tenant {tenant} may have {most} {what}, and would have {found}; delete adapters, which count until "
                "the operator collects garbage, or have the quota raised"
            )
