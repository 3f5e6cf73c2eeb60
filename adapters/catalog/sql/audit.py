"""The audit log in the catalog's database. It can be appended to and read; nothing here changes or deletes a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import insert, select

from adapters.catalog.records import AuditEvent
from adapters.catalog.sql.database import Database
from adapters.catalog.sql.tables import audit_events

MAX_TEXT = 500  # characters of each field


class SqlAudit:
    """The events of a catalog. Every method can raise CatalogUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, events: Sequence[AuditEvent]) -> None:
        """Append events, all or none. Long texts are cut."""
        rows = [
            {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in asdict(event).items()}
            for event in events
        ]
        if rows:
            self._database.transact(lambda connection: connection.execute(insert(audit_events), rows).close())

    def newest(self, limit: int, tenant: str | None = None) -> Sequence[AuditEvent]:
        """The newest events, or those of a tenant's principals, the oldest of them first."""
        query = select(audit_events).order_by(audit_events.c.id.desc()).limit(limit)
        if tenant is not None:
            query = query.where(audit_events.c.tenant == tenant)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [AuditEvent(*row[1:]) for row in reversed(rows)]
