"""The catalog in a SQL database."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import datetime
from typing import Self, TypeVar

from sqlalchemy import Connection, select

from adapters.catalog.records import AdapterDetails, AdapterRevision, AdapterSummary, AliasMove, AliasTarget, Change
from adapters.catalog.sql import garbage, listing, lookup, writing
from adapters.catalog.sql.accounts import SqlAudit, SqlUsage
from adapters.catalog.sql.database import Database, Transaction
from adapters.catalog.sql.grants import SqlGrants
from adapters.catalog.sql.keys import SqlKeys
from adapters.catalog.sql.quota_pool import SqlQuotaPool
from adapters.catalog.sql.rights import Right, check_right
from adapters.catalog.sql.tables import adapters, changes, make_tables, revisions
from adapters.catalog.sql.tenants import CatalogQuota, SqlTenants, no_more_pins
from adapters.errors import InvalidReference
from adapters.identity import LATEST, AdapterReference, check_revision_id
from adapters.model.manifest import Manifest
from adapters.scopes import Permission

T = TypeVar("T")

MAX_PAGE = 1000
_FSCK_PAGE = 10_000


class SqlCatalog(Database):
    """Adapters, revisions, aliases and their changes, for any number of threads and processes.

    Every method can raise CatalogUnavailable, and every one that takes a name InvalidReference. Each change is one
    transaction, which `changes_since` reports.
    """

    def __init__(self, url: str):
        """Does not connect yet. Raises ValueError unless `url` is `sqlite:///FILE` or `postgresql://…`."""
        super().__init__(url)
        self._make_parts()

    def _make_parts(self) -> None:
        self.keys = SqlKeys(self)
        self.grants = SqlGrants(self)
        self.audit = SqlAudit(self)
        self.tenants = SqlTenants(self)
        self.quotas = SqlQuotaPool(self)
        self.usage = SqlUsage(self)

    @classmethod
    def open(cls, url: str) -> Self:
        """Open a database's catalog, after creating or migrating its tables. Raises CatalogTooNew."""
        catalog = cls(url)
        catalog.transact(make_tables)
        return catalog

    def permitted(self, right: Right) -> Self:
        """This catalog, each of whose changes raises RightWithdrawn once the right has ended."""
        catalog = copy(self)
        catalog._check = lambda transaction: check_right(transaction, right)
        catalog._make_parts()
        return catalog

    def add_revision(
        self,
        tenant: str,
        name: str,
        manifest: Manifest,
        revision_id: str,
        bytes: int,
        *,
        stored_since: int | None,
        warnings: Sequence[str] = (),
        by: str | None = None,
        moves_latest: bool = True,
        alias: str | None = None,
        quota: CatalogQuota | None = None,
    ) -> AdapterRevision:
        """Add content as a revision of an adapter, which is created if it is new, and point `latest` at it.

        `warnings`: about the files, one line each. Content that the adapter already has keeps its number; only `latest`
        moves. Without `moves_latest`, `latest` stays, unless the adapter is new. `alias` is pointed at the revision,
        too. `stored_since` is `last_change()` from before the bytes were stored (see `garbage.py`), or None for memory-
        only content, which becomes stored as soon as anybody stores it. `quota`: what the tenant may have. Raises
        TenantFull, RevisionBeingRemoved, and CatalogConflict for a deleted adapter that can still be restored.
        """
        _check(tenant, name, LATEST if alias is None else alias)
        check_revision_id(revision_id)
        content = manifest, revision_id, bytes, warnings, stored_since
        return self._write(
            tenant,
            quota,
            lambda transaction: writing.add_revision(
                transaction, tenant, name, *content, by, moves_latest, alias, quota
            ),
        )

    def resolve(self, reference: str) -> AdapterRevision:
        """The one revision that a reference names. Raises AdapterNotFound, and InvalidReference for a split alias."""
        found = self.resolve_parsed(AdapterReference.parse(reference))
        if found.split is not None:
            target, name = found.split.target, found.full_name
            raise InvalidReference(
                f"{reference!r} is split ({target}): name {name}@r{target.number} or {name}@r{target.newer}"
            )
        return found

    def resolve_parsed(self, wanted: AdapterReference) -> AdapterRevision:
        """What a reference names, by one query; of a split alias the older revision, whose `split` has the newer.

        Raises AdapterNotFound.
        """

        def query(connection: Connection) -> AdapterRevision:
            found = lookup.find_revision(connection, wanted)
            if found is None:
                raise lookup.not_found(connection, wanted)
            return found

        return self.read(query)

    def list(
        self,
        tenant: str | None = None,
        prefix: str | None = None,
        after: tuple[str, str] | None = None,
        limit: int = 100,
        *,
        deleted: bool = False,
        viewer: tuple[str, Permission | None] | None = None,
    ) -> Sequence[AdapterSummary]:
        """A page of adapters by tenant and name; of deleted and not yet purged ones if `deleted`.

        `prefix` filters by name. The next page is that `after` the last entry's (tenant, name). `viewer` leaves the
        tenant's own adapters and those that it has this permission for, if one is given.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise ValueError(f"a page of {limit} adapters cannot be had; ask for 1 to {MAX_PAGE}")
        return self.read(
            lambda connection: listing.list_adapters(connection, tenant, prefix, after, limit, deleted, viewer)
        )

    def show(self, tenant: str, name: str, limit: int = 100) -> AdapterDetails:
        """An adapter, its aliases and its newest `limit` revisions. Raises AdapterNotFound."""
        _check(tenant, name)
        return self.read(lambda connection: listing.show_adapter(connection, tenant, name, limit))

    def set_alias(
        self,
        tenant: str,
        name: str,
        alias: str,
        target: int | AliasTarget,
        *,
        expected: int | AliasTarget | None = None,
        by: str | None = None,
        quota: CatalogQuota | None = None,
    ) -> AliasMove:
        """Point an alias at a revision, or at two; return the move, an earlier one if the alias was already there.

        If `expected` is given, the alias must be there, or be new for 0; otherwise CatalogConflict is raised. `quota`:
        what the tenant may have; only its pins count here. Raises AdapterNotFound, TenantFull, and InvalidReference
        for a split of `latest`.
        """
        _check(tenant, name, alias)
        to = AliasTarget(target) if isinstance(target, int) else target
        at = AliasTarget(expected) if isinstance(expected, int) else expected
        return self._write(
            tenant, quota, lambda transaction: writing.set_alias(transaction, tenant, name, alias, to, at, by)
        )

    def rollback(
        self, tenant: str, name: str, alias: str = LATEST, *, by: str | None = None, quota: CatalogQuota | None = None
    ) -> AliasMove:
        """Point an alias at where it pointed before, a split included; a second rollback, where before that.

        A rollback is a move in the history. `quota`: as for `set_alias`. Raises AdapterNotFound, TenantFull, and
        CatalogConflict if there is nothing before.
        """
        _check(tenant, name, alias)
        return self._write(tenant, quota, lambda transaction: writing.roll_back(transaction, tenant, name, alias, by))

    def remove_alias(self, tenant: str, name: str, alias: str) -> str | None:
        """Remove an alias with its history; return the revision id that went with it, if one did.

        A revision in memory only goes with its last alias, and with its last revision an adapter. `latest`, which every
        adapter has, moves on if the push that made the alias put it there. Raises AdapterNotFound, InvalidReference.
        """
        _check(tenant, name, alias)
        if alias == LATEST:
            raise InvalidReference(f"{LATEST!r} cannot be removed; point it at another revision, or delete the adapter")
        return self.write(lambda transaction: writing.remove_alias(transaction, tenant, name, alias))

    def alias_history(self, tenant: str, name: str, alias: str = LATEST, limit: int = 100) -> Sequence[AliasMove]:
        """The newest `limit` moves of an alias, newest first; each begins where the one before it ended.

        Raises AdapterNotFound, also for an unknown alias.
        """
        _check(tenant, name, alias)
        return self.read(lambda connection: listing.list_moves(connection, tenant, name, alias, limit))

    def delete(self, tenant: str, name: str) -> None:
        """Delete an adapter, which can be restored until it is purged. Raises AdapterNotFound."""
        _check(tenant, name)
        self.write(lambda transaction: writing.delete_adapter(transaction, tenant, name))

    def restore(self, tenant: str, name: str, *, quota: CatalogQuota | None = None) -> None:
        """Undo `delete`. Raises AdapterNotFound if the adapter never existed or has been purged.

        `quota`: as for `set_alias`, which raises TenantFull.
        """
        _check(tenant, name)
        self._write(tenant, quota, lambda transaction: writing.restore_adapter(transaction, tenant, name))

    def collect_garbage(self, older_than: datetime) -> Sequence[str]:
        """Purge the adapters deleted before `older_than`; return the revision ids whose bytes must be removed.

        Call it while `collecting`. No adapter has those ids, not even a deleted one. Call `confirm_removed` once their
        bytes are gone; until then they cannot be imported, and every further collection returns them again.
        """
        return garbage.collect(self, older_than)

    def condemn(self, revision_id: str) -> bool:
        """Announce the removal of bytes that have no row; False if they have one by now.

        Call it while `collecting`, and `confirm_removed` after it. An import that has found these bytes in the store is
        refused from now on, and must store them again.
        """
        return self.write(lambda transaction: garbage.condemn(transaction, revision_id))

    def confirm_removed(self, revision_ids: Sequence[str]) -> None:
        """Record that the store no longer has the bytes of collected revisions."""
        if revision_ids:
            self.write(lambda transaction: garbage.confirm(transaction, revision_ids))

    def referenced_revisions(self) -> Iterator[str]:
        """Ascending ids of all revisions whose bytes must be in the store, also for adapters that can be restored."""
        query = select(revisions.c.revision_id).where(revisions.c.stored)
        query = query.order_by(revisions.c.revision_id).limit(_FSCK_PAGE)

        def after(last: str) -> Sequence[str]:
            page = query.where(revisions.c.revision_id > last)
            return self.read(lambda connection: connection.execute(page).scalars().all())

        page = after("")
        while page:
            yield from page
            page = after(page[-1])

    def kept_in_memory(self, revision_ids: Sequence[str]) -> dict[str, bool]:
        """For each of the known revisions, whether workers must keep it in memory.

        That is so for memory-only content while an alias of an adapter that is not deleted points at it.
        """
        return self.read(lambda connection: lookup.kept_in_memory(connection, revision_ids))

    def changes_since(self, sequence: int, limit: int = 1000) -> Sequence[Change]:
        """The first `limit` changes after a sequence, in order and without gaps.

        Old changes are trimmed: then the first one does not follow `sequence`.
        """
        query = (
            select(changes.c.sequence, changes.c.kind, adapters.c.tenant, adapters.c.name)
            .select_from(changes)
            .outerjoin(adapters, adapters.c.id == changes.c.adapter_id)
            .where(changes.c.sequence > sequence)
            .order_by(changes.c.sequence)
            .limit(limit)
        )
        return self.read(lambda connection: [Change(*row) for row in connection.execute(query)])

    def _write(self, tenant: str, quota: CatalogQuota | None, work: Callable[[Transaction], T]) -> T:
        """A change that may make aliases point at more revisions in memory only. Raises TenantFull."""

        def change(transaction: Transaction) -> T:
            with no_more_pins(transaction.connection, tenant, quota):
                return work(transaction)

        return self.write(change)


def _check(tenant: str, name: str, alias: str = LATEST) -> None:
    if AdapterReference.parse(f"{tenant}/{name}@{alias}").alias != alias:
        raise InvalidReference(f"{alias!r} cannot be an alias: in a reference it would be a revision; choose another")
