"""The catalog's tables. `make_tables` makes them, and will bring those of earlier releases up to date.

    tenants ─< adapters ─< adapter_revisions >─ revisions >─ manifests
                  ├─< aliases          alias -> number, now
                  ├─< alias_moves      every alias that was ever moved, append-only
                  ├─< alias_splits     of the moves from or to two revisions, the newer ones
                  └─< changes          every commit, append-only
    change_counter                     one row: the last change; its lock is the right to write
    removals                           content that garbage collections have removed
    tenants ─< api_keys                digests of keys, and what each permits
    tenants ─< grants                  what a tenant lets another one do with its adapters
    tenant_generations                 which tenant of a name it is, once one was deleted, by the digest
    audit_events                       changes and denials, append-only
    token_usage                        tokens by hour, tenant, key, adapter and router
    alembic_version                    one row: the release of the tables, by a name that 0.1.0 gave it
    quota_members, quota_pools, quota_holdings    limits that routers share; rows of no lasting value

A row of `revisions` is content, known by its digest; a row of `adapter_revisions` says that an adapter has it, under
which number. Content that is not `stored` is in workers' memory only. Adapters of one base and one recipe have equal
manifests, which can be tens of kilobytes: each is stored once.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    insert,
    inspect,
    select,
    true,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeDecorator, TypeEngine

from adapters.catalog.sql.locks import AdvisoryLock, take
from adapters.errors import CatalogTooNew

VERSION = "0007"  # the tables of 0.1.0

T = TypeVar("T")
AnyRow = Row[*tuple[Any, ...]]
AnySelect = Select[*tuple[Any, ...]]

# Bytewise order on both databases, so that names sort the same and a prefix is a range of the index.
NAME: TypeEngine[str] = Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
ID: TypeEngine[int] = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by INTEGER only


class UtcTime(TypeDecorator[datetime]):
    """A time with its zone, also on SQLite, which stores none."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many as a statement may have parameters."""
    for start in range(0, len(values), 1000):
        yield values[start : start + 1000]


def _id() -> Column[int]:
    return Column("id", ID, Identity(), primary_key=True)


version = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))

tenants = Table(
    "tenants",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("created_at", UtcTime, nullable=False),
)

tenant_generations = Table(
    "tenant_generations",
    metadata,
    Column("digest", NAME, primary_key=True),  # of the name: the names of deleted tenants are nowhere
    Column("generation", Integer, nullable=False),  # random, of the present tenant; no row: none was deleted
)

adapters = Table(
    "adapters",
    metadata,
    _id(),
    Column("tenant", NAME, ForeignKey(tenants.c.name), nullable=False),
    Column("name", NAME, nullable=False),
    Column("last_number", Integer, nullable=False),  # of its revisions, purged ones included
    Column("created_at", UtcTime, nullable=False),
    Column("deleted_at", UtcTime),
    Column("purged_at", UtcTime),  # its revisions are gone; the row prevents reuse of their numbers
    Column("shares_prefixes", Boolean, nullable=False, server_default=false()),  # between tenants
    UniqueConstraint("tenant", "name"),
)
Index(
    "ix_adapters_to_purge",
    adapters.c.deleted_at,
    sqlite_where=adapters.c.deleted_at.is_not(None) & adapters.c.purged_at.is_(None),
    postgresql_where=adapters.c.deleted_at.is_not(None) & adapters.c.purged_at.is_(None),
)

manifests = Table(
    "manifests",
    metadata,
    _id(),
    Column("digest", NAME, nullable=False),
    Column("json", Text, nullable=False),
    UniqueConstraint("digest"),
)

revisions = Table(
    "revisions",
    metadata,
    _id(),
    Column("revision_id", NAME, nullable=False),
    Column("manifest_id", ForeignKey(manifests.c.id), nullable=False),
    Column("kinds", Text, nullable=False),  # joined by commas
    Column("positions", Text, nullable=False),
    Column("trained_positions", Text),  # where they are others
    Column("base_model", Text, nullable=False),  # fingerprint
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("stored", Boolean, nullable=False, server_default=true()),  # the store must have its bytes
    UniqueConstraint("revision_id"),
)

adapter_revisions = Table(
    "adapter_revisions",
    metadata,
    Column("adapter_id", ForeignKey(adapters.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("content_id", ForeignKey(revisions.c.id), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("warnings", Text, nullable=False, server_default=""),  # of its import, one a line
    UniqueConstraint("adapter_id", "content_id"),
    Index(None, "content_id"),
    sqlite_with_rowid=False,
)

aliases = Table(
    "aliases",
    metadata,
    Column("adapter_id", ForeignKey(adapters.c.id), primary_key=True),
    Column("alias", NAME, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("move", BigInteger, nullable=False),  # the sequence of the move that put it there
    ForeignKeyConstraint(["adapter_id", "number"], [adapter_revisions.c.adapter_id, adapter_revisions.c.number]),
    sqlite_with_rowid=False,
)

alias_moves = Table(
    "alias_moves",
    metadata,
    Column("adapter_id", ForeignKey(adapters.c.id), primary_key=True),
    Column("alias", NAME, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("from_number", Integer),
    Column("to_number", Integer, nullable=False),
    # The move that a rollback returns to. A rollback copies it from the move that it repeats, so the next one goes
    # further back.
    Column("before", BigInteger),
    Column("moved_at", UtcTime, nullable=False),
    Column("moved_by", Text),
    sqlite_with_rowid=False,
)

# Of releases after 0.1.0, which serves the older revision to all. It has no foreign keys, as 0.1.0 removes adapters
# and leaves the rows. These mean nothing then: a sequence is never given out again.
alias_splits = Table(
    "alias_splits",
    metadata,
    Column("adapter_id", ID, primary_key=True, autoincrement=False),
    Column("alias", NAME, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),  # of the move
    Column("from_newer", Integer),
    Column("from_percent", Integer),
    Column("newer", Integer),  # the number of the newer revision; NULL: the move ended a split
    Column("percent", Integer),  # that it gets
    sqlite_with_rowid=False,
)
IS_SPLIT = (  # joined to `aliases`: how an alias is split now
    (alias_splits.c.adapter_id == aliases.c.adapter_id)
    & (alias_splits.c.alias == aliases.c.alias)
    & (alias_splits.c.sequence == aliases.c.move)
)

changes = Table(
    "changes",
    metadata,
    Column("sequence", ID, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("adapter_id", ForeignKey(adapters.c.id)),
    Column("changed_at", UtcTime, nullable=False),
)

change_counter = Table(
    "change_counter",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1
    Column("last", BigInteger, nullable=False),
)

removals = Table(
    "removals",
    metadata,
    Column("revision_id", NAME, primary_key=True),
    Column("condemned_at", UtcTime, nullable=False),
    Column("removed_sequence", BigInteger),  # NULL: its bytes may still be in the store
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", NAME, primary_key=True),
    Column("tenant", NAME, ForeignKey(tenants.c.name), nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", NAME, nullable=False),  # SHA-256 of the key, in hexadecimal
    Column("scopes", Text, nullable=False),  # joined by commas
    Column("created_at", UtcTime, nullable=False),
    Column("created_by", Text),
    Column("expires_at", UtcTime),
    Column("revoked_at", UtcTime),
    Column("changed", BigInteger, nullable=False),  # the sequence of the newest change to the row
    Index(None, "changed"),
    Index(None, "tenant"),
)

grants = Table(
    "grants",
    metadata,
    Column("owner", NAME, ForeignKey(tenants.c.name), primary_key=True),
    Column("name", NAME, primary_key=True),  # of an adapter; empty: all of the owner's
    Column("grantee", NAME, ForeignKey(tenants.c.name), primary_key=True),
    Column("permission", NAME, primary_key=True),
    Column("created_at", UtcTime, nullable=False),
    Column("created_by", Text),
    Index(None, "grantee"),
)

audit_events = Table(
    "audit_events",
    metadata,
    _id(),
    Column("at", UtcTime, nullable=False),
    Column("who", Text, nullable=False),
    Column("tenant", NAME),
    Column("action", Text, nullable=False),
    Column("object", Text),
    Column("old", Text),
    Column("new", Text),
    Column("outcome", Text, nullable=False),
    Column("request_id", Text),
)

token_usage = Table(  # of releases after 0.1.0, which leaves it alone
    "token_usage",
    metadata,
    Column("tenant", NAME, primary_key=True),
    Column("hour", UtcTime, primary_key=True),
    Column("key", NAME, primary_key=True),
    Column("adapter", NAME, primary_key=True),
    Column("revision", NAME, primary_key=True),
    Column("model", NAME, primary_key=True),
    Column("router", NAME, primary_key=True),  # each sets its own rows
    Column("requests", BigInteger, nullable=False),
    Column("estimated_requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Index(None, "hour"),
    sqlite_with_rowid=False,
)

quota_members = Table(
    "quota_members",
    metadata,
    Column("member", NAME, primary_key=True),  # a router's process
    Column("seen_at", Double, nullable=False),  # seconds since 1970, as all times of these tables
)

quota_pools = Table(
    "quota_pools",
    metadata,
    Column("subject", NAME, primary_key=True),  # digest of whose limit it is
    Column("level", Double, nullable=False),
    Column("at", Double, nullable=False),
    Column("full_at", Double, nullable=False),  # then the row says nothing more
    Index(None, "full_at"),
)

quota_holdings = Table(
    "quota_holdings",
    metadata,
    Column("subject", NAME, primary_key=True),
    Column("member", NAME, primary_key=True),
    Column("wanted", Double, nullable=False),
    Column("held", Double, nullable=False),
    Index(None, "member"),
)


def make_tables(connection: Connection) -> None:
    """Create the tables if there are none, within the caller's transaction. Raises CatalogTooNew for other ones."""
    take(connection, AdvisoryLock.MIGRATE)
    if not inspect(connection).has_table(version.name):
        metadata.create_all(connection)
        connection.execute(insert(version), {"version_num": VERSION})
        connection.execute(insert(change_counter), {"id": 1, "last": 0})
        return
    current = connection.execute(select(version.c.version_num)).scalar()
    if current != VERSION:
        raise CatalogTooNew(
            f"the catalog's tables are at step {current}, which this release does not know; its own is {VERSION}. Run "
            "the release that made them; tables from before 0.1.0 are brought up to date by 0.1.0"
        )
    for added in (token_usage, alias_splits):
        added.create(connection, checkfirst=True)
