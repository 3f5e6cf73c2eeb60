"""Accounts of what was done and used, in the catalog's database: the audit log, and tokens. Nothing deletes a row."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from adapters.catalog.records import AuditEvent
from adapters.catalog.sql.database import CatalogPart
from adapters.catalog.sql.tables import audit_events, token_usage
from adapters.catalog.usage import COUNTS, MAX_GROUPS, Counts, InvalidQuery, Subject, UsageQuery

MAX_TEXT = 500  # characters of each field


class SqlAudit(CatalogPart):
    """The audit log. It can be appended to and read. Every method can raise CatalogUnavailable."""

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


class SqlUsage(CatalogPart):
    """Tokens by hour and subject. Every method can raise CatalogUnavailable."""

    def put(self, rows: Sequence[tuple[Subject, Counts]]) -> None:
        """Set a router's rows, all or none. To repeat it is harmless, also if a later put came in between."""
        values = [
            {**subject._asdict(), **asdict(counts), "hour": datetime.fromtimestamp(3600 * subject.hour, UTC)}
            for subject, counts in rows
        ]

        def put(connection: Connection) -> None:
            dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
            new = dialect.insert(token_usage)
            put = new.on_conflict_do_update(
                index_elements=list(token_usage.primary_key),
                set_={name: new.excluded[name] for name in COUNTS},
                where=new.excluded.requests > token_usage.c.requests,  # else what is there came later
            )
            connection.execute(put, values)

        if values:
            self._database.transact(put)

    def sums(self, query: UsageQuery) -> list[dict[str, Any]]:
        """The sums, ordered by their groups: what was not there, such as a base model's adapter, is None.

        Raises InvalidQuery for more than MAX_GROUPS.
        """
        groups = [token_usage.c[name] for name in query.group_by]
        asked = (
            select(*groups, *(func.sum(token_usage.c[name]) for name in COUNTS))
            .where(token_usage.c.hour >= query.start, token_usage.c.hour < query.end)
            .where(*(token_usage.c.tenant == tenant for tenant in query.tenants))
            .group_by(*groups)
            .order_by(*groups)
            .limit(MAX_GROUPS + 1)
        )
        rows = self._database.read(lambda connection: connection.execute(asked).all())
        if len(rows) > MAX_GROUPS:
            raise InvalidQuery(
                "group_by",
                f"is {','.join(query.group_by)}, which gives more than {MAX_GROUPS} rows; ask for fewer groups, a "
                "shorter time, or one tenant",
            )
        num_groups = len(groups)
        return [
            dict(zip(query.group_by, (value or None for value in row[:num_groups]), strict=True))
            | dict(zip(COUNTS, map(int, row[num_groups:]), strict=True))
            for row in rows
        ]
