"""Managed adapters: one interface to the catalog and the store.

What the catalog names as stored is always in the store. An import stores bytes before it adds the row, a removal
deletes the row before the bytes, so a crash in between leaves unreferenced bytes at worst. A memory-only revision has a
row that says that it is not stored; workers have its bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.locks import StillHeld
from adapters.catalog.sql.rights import Right
from adapters.catalog.sql.tenants import CatalogQuota, RemovedTenant
from adapters.errors import CatalogConflict, RevisionBeingRemoved
from adapters.files.work_folder import work_folder
from adapters.formats import Limits
from adapters.formats.positions import GivenPositions
from adapters.identity import check_not_base_model, folder_of, split_adapter_name
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest
from adapters.model.serving import EngineDtype
from adapters.packed import announced_sha256, read_packed
from adapters.packed.export import export_packed
from adapters.packed.packing import PackedSize, Packer, pack_directory
from adapters.store import AdapterStore, Envelope, RevisionNotStored, StoreCorrupt
from adapters.store.errors import disk_full_at
from adapters.store.fsck import FsckReport, fsck

_MOST_ATTEMPTS = 10  # of an import whose bytes a garbage collection is removing
_REMOVAL_WAIT_S = 0.2  # between two attempts
_BEFORE_ALL_DELETIONS = datetime(1970, 1, 1, tzinfo=UTC)
_CONFIRMED_AT_A_TIME = 100  # removals; a killed collection repeats at most as many


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter's content in packed form, in a file that the caller owns."""

    manifest: Manifest
    path: Path
    envelope: Envelope  # of the file, with the digest that workers are told
    warnings: tuple[str, ...] = ()  # about the files that it was packed from

    @property
    def revision_id(self) -> str:
        return self.envelope.revision_id


@dataclass(frozen=True, slots=True)
class AdapterLibrary:
    """Changes to adapters, for any number of threads and processes.

    Any method may raise CatalogUnavailable or StoreUnavailable. The change is then applied fully or not at all, except
    in `collect_garbage` and in `fsck` with `repair`: what they have removed stays removed, and their next run
    continues.
    """

    catalog: SqlCatalog
    store: AdapterStore
    base: BaseModel
    limits: Limits
    dtype: EngineDtype
    base_name: str | None = None  # what clients call the base model: no adapter may have that name
    packer: Packer = pack_directory  # of `import_directory` and `pack`

    def permitted(self, right: Right) -> Self:
        """This library, each of whose changes raises RightWithdrawn once the right has ended."""
        return replace(self, catalog=self.catalog.permitted(right))

    def begun(self, name: str) -> Self:
        """This library for a long change of an adapter, which ends with the tenant. Raises InvalidReference."""
        tenant, _ = self._checked(name)
        return self.permitted(Right((tenant,), self.catalog.tenants.generations()))

    def import_directory(
        self,
        name: str,
        directory: Path,
        *,
        by: str | None = None,
        moves_latest: bool = True,
        alias: str | None = None,
        on_content: Callable[[str], None] | None = None,
        quota: CatalogQuota | None = None,
        positions: GivenPositions | None = None,
        lineage: tuple[str, ...] = (),
    ) -> AdapterRevision:
        """Import a directory's content as a revision of the adapter `name` or `tenant/name`.

        `latest` points at it unless `moves_latest` is False, and so does `alias`, in the same commit. Content that the
        adapter already has keeps its number and its `lineage`, where it is from. It is applied to `positions`; None: to
        its own. `on_content` gets the revision id before anything is written, and what it raises ends the import.
        Raises what `read_adapter` raises;
        TenantFull if the tenant would have more than `quota`; InvalidReference, also for the base model's name;
        AdapterIncompatible if a value does not fit the serving dtype; AdapterTooLarge; CatalogConflict for a deleted
        adapter that can still be restored; StoreFull; StoreConflict if the store has the revision in another dtype; and
        RevisionBeingRemoved if a garbage collection takes long over its bytes.
        """
        tenant, short_name = self._checked(name)

        def before_writing(size: PackedSize) -> None:
            if on_content is not None:
                on_content(size.revision_id)
            self.catalog.tenants.check_bytes(tenant, size.revision_id, size.num_bytes, quota)

        with work_folder("import") as folder:
            packed = folder / "adapter"
            size = self.packer(directory, packed, self.base, self.limits, self.dtype, before_writing, positions)
            for attempt in range(_MOST_ATTEMPTS):
                stored_since = self.catalog.last_change()
                self.store.publish(size.revision_id, packed)
                try:
                    return self.catalog.add_revision(
                        tenant,
                        short_name,
                        size.manifest,
                        size.revision_id,
                        size.num_bytes,
                        warnings=(*size.warnings, *lineage),
                        stored_since=stored_since,
                        by=by,
                        moves_latest=moves_latest,
                        alias=alias,
                        quota=quota,
                    )
                except RevisionBeingRemoved:
                    if attempt == _MOST_ATTEMPTS - 1:
                        raise
                self._let_removals_finish()
        raise AssertionError("unreachable")

    def pack(
        self,
        name: str,
        directory: Path,
        target: Path,
        quota: CatalogQuota | None = None,
        positions: GivenPositions | None = None,
    ) -> PackedAdapter:
        """Pack a directory's content into the new file `target`, for workers that keep it in memory only.

        Changes neither catalog nor store; `add_in_memory` records the revision. Raises as `import_directory`, and
        StoreFull if `target` has no room.
        """
        tenant, _ = self._checked(name)

        def before_writing(size: PackedSize) -> None:
            self.catalog.tenants.check_bytes(tenant, size.revision_id, size.num_bytes, quota)

        size = self.packer(directory, target, self.base, self.limits, self.dtype, before_writing, positions)
        envelope = self.store.signed(Envelope(size.revision_id, announced_sha256(target), size.num_bytes))
        return PackedAdapter(size.manifest, target, envelope, size.warnings)

    def add_in_memory(
        self,
        name: str,
        packed: PackedAdapter,
        alias: str,
        *,
        by: str | None = None,
        quota: CatalogQuota | None = None,
    ) -> AdapterRevision:
        """Record content that workers have in memory as a revision, and point an alias at it, in one commit.

        Content that is in the store stays marked as stored. Raises InvalidReference, and CatalogConflict for a deleted
        adapter that can still be restored.
        """
        tenant, short_name = self._checked(name)
        return self.catalog.add_revision(
            tenant,
            short_name,
            packed.manifest,
            packed.revision_id,
            packed.envelope.content_bytes,
            warnings=packed.warnings,
            stored_since=None,
            by=by,
            moves_latest=False,
            alias=alias,
            quota=quota,
        )

    def export(self, reference: str, directory: Path) -> AdapterRevision:
        """Write the revision that a reference names into the new directory `directory`; return the revision.

        The precision is the serving dtype's (see `adapters.packed.export`). Raises AdapterNotFound, FileExistsError,
        RevisionNotStored, StoreCorrupt, and StoreFull if there is no room.
        """
        revision = self.catalog.resolve(reference)
        if not revision.stored:
            raise RevisionNotStored(
                f"{revision.full_name}@r{revision.number} is kept in workers' memory only, so there is nothing to "
                "export; import the same files to have it stored"
            )
        with work_folder("export") as folder:
            path = folder / folder_of(revision.revision_id)
            self.store.fetch(revision.revision_id, path)
            with disk_full_at(directory):
                export_packed(read_packed(path), directory)
        return revision

    def collect_garbage(self, older_than: datetime) -> int:
        """Purge adapters deleted before `older_than` and remove unneeded bytes; return the number of revisions.

        Not atomic: after an error or a kill, the next collection removes the rest. Raises CatalogConflict while another
        collection runs.
        """
        with self.catalog.collecting() as check_still_collecting:
            return self._remove_garbage(older_than, check_still_collecting)

    def remove_tenant(self, tenant: str, *, has_tokens: bool = False) -> RemovedTenant:
        """Remove a tenant from the catalog, and the bytes that only its adapters needed from the store.

        Not atomic: after an error or a kill, the next garbage collection removes the remaining bytes. `has_tokens`: see
        `SqlTenants.remove`. Raises AccessNotFound, and CatalogConflict while a collection runs.
        """
        with self.catalog.collecting() as check_still_collecting:
            removed = self.catalog.tenants.remove(tenant, has_tokens=has_tokens)
            self._remove_garbage(_BEFORE_ALL_DELETIONS, check_still_collecting)
        return removed

    def _remove_garbage(self, older_than: datetime, check_still_collecting: StillHeld) -> int:
        revision_ids = self.catalog.collect_garbage(older_than)
        for start in range(0, len(revision_ids), _CONFIRMED_AT_A_TIME):
            batch = revision_ids[start : start + _CONFIRMED_AT_A_TIME]
            for revision_id in batch:
                check_still_collecting()
                self.store.delete(revision_id)
            self.catalog.confirm_removed(batch)
        return len(revision_ids)

    def _checked(self, name: str) -> tuple[str, str]:
        if self.base_name is not None:
            check_not_base_model(name, self.base_name)
        return split_adapter_name(name)

    def _let_removals_finish(self) -> None:
        """Finish the removals of a killed collection; wait a little for a running one."""
        try:
            self.collect_garbage(_BEFORE_ALL_DELETIONS)
        except CatalogConflict:
            time.sleep(_REMOVAL_WAIT_S)

    def fsck(self, min_age_s: float, *, repair: bool = False, check_content: bool = True) -> FsckReport:
        """Compare the store with the catalog. See `adapters.store.fsck`.

        Unreferenced bytes are removed as by a garbage collection, so that no concurrent import builds on them; they
        stay while a collection runs.
        """
        return fsck(
            self.store,
            self.catalog.referenced_revisions(),
            min_age_s,
            self._remove_unreferenced,
            repair=repair,
            check_content=check_content,
        )

    def sign(self) -> tuple[int, list[str]]:
        """Sign every object of the store that lacks this library's signature, trusting what it has.

        Returns how many were signed, and the revisions whose objects are damaged, which stay as they are.
        """
        num_signed, damaged = 0, []
        for stored in self.store.list():
            try:
                num_signed += self.store.sign(stored.revision_id)
            except StoreCorrupt:
                damaged.append(stored.revision_id)
            except RevisionNotStored:
                pass  # removed meanwhile
        return num_signed, damaged

    def _remove_unreferenced(self, revision_id: str) -> bool:
        """Remove bytes without a row; False if they have one by now, or if another process is collecting."""
        try:
            with self.catalog.collecting() as check_still_collecting:
                if not self.catalog.condemn(revision_id):
                    return False
                check_still_collecting()
                self.store.delete(revision_id)
                self.catalog.confirm_removed([revision_id])
        except CatalogConflict:
            return False
        return True
