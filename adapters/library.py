"""Managed adapters: the catalog and the store as one, so that what the catalog names as stored is always in the store.

The order is what makes a crash harmless. In: bytes first, then the row. Out: the row first, then the bytes. A revision
in memory only has bytes that workers were given, and a row that says that the store has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.errors import CatalogConflict, InvalidReference, RevisionBeingRemoved
from adapters.files.work_folder import work_folder
from adapters.formats import Limits, read_adapter
from adapters.identity import check_not_base_model, folder_of, split_adapter_name
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter
from adapters.model.serving import EngineDtype
from adapters.packed import read_packed, write_packed
from adapters.packed.export import export_packed
from adapters.store import AdapterStore, Envelope, RevisionNotStored
from adapters.store.fsck import FsckReport, fsck
from adapters.store.room import room_at

_MOST_ATTEMPTS = 5  # of an import whose bytes a garbage collection is taking out
_REMOVAL_WAIT_S = 0.5  # between two of them
_BEFORE_ALL_DELETIONS = datetime(1970, 1, 1, tzinfo=UTC)
_CONFIRMED_AT_A_TIME = 100  # removals; a collection that is killed repeats as many

ImportStep = Literal["reading", "packing", "storing", "committing"]


def _tell_nobody(_step: ImportStep) -> None:
    pass


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter's content in its packed form, in a file that is its maker's."""

    manifest: Manifest
    path: Path
    envelope: Envelope  # which says what the file is

    @property
    def revision_id(self) -> str:
        return self.envelope.revision_id


@dataclass(frozen=True, slots=True)
class AdapterLibrary:
    """What changes adapters, for any number of threads and processes. Any method may raise CatalogUnavailable or
    StoreUnavailable; then nothing has changed, or all that was asked for.
    """

    catalog: SqlCatalog
    store: AdapterStore
    base: BaseModel
    limits: Limits
    dtype: EngineDtype
    base_name: str | None = None  # what clients call the base model: no adapter may have that name

    def import_directory(
        self,
        name: str,
        directory: Path,
        *,
        by: str | None = None,
        moves_latest: bool = True,
        on_step: Callable[[ImportStep], None] = _tell_nobody,
    ) -> AdapterRevision:
        """Makes a directory's content a revision of the adapter `name` or `tenant/name`. See `add`.

        Raises what `read_adapter` raises, too.
        """
        self._checked(name)
        on_step("reading")
        adapter = read_adapter(directory, self.base, self.limits)
        return self.add(name, adapter, by=by, moves_latest=moves_latest, on_step=on_step)

    def add(
        self,
        name: str,
        adapter: Adapter,
        *,
        by: str | None = None,
        moves_latest: bool = True,
        on_step: Callable[[ImportStep], None] = _tell_nobody,
    ) -> AdapterRevision:
        """Makes an adapter's content a revision, the latest one unless `moves_latest` is False.

        Content that the adapter already has keeps its number. `on_step` hears what begins. Raises InvalidReference,
        also for the base model's name, AdapterIncompatible where it does not fit the serving dtype, CatalogConflict for
        an adapter that is deleted and can still be restored, StoreFull, StoreConflict where the store has the revision
        in another dtype, and RevisionBeingRemoved where a garbage collection takes long over its bytes.
        """
        tenant, short_name = self._checked(name)
        on_step("packing")
        revision_id, manifest = revision_id_of(adapter), Manifest.of(adapter)
        with work_folder("import") as folder:
            packed = folder / folder_of(revision_id)
            with room_at(packed):
                write_packed(adapter, self.base, self.dtype, packed)
            for attempt in range(_MOST_ATTEMPTS):
                on_step("storing")
                stored_since = self.catalog.last_change()
                self.store.publish(revision_id, packed)
                on_step("committing")
                try:
                    return self.catalog.add_revision(
                        tenant,
                        short_name,
                        manifest,
                        revision_id,
                        packed.stat().st_size,
                        stored_since=stored_since,
                        by=by,
                        moves_latest=moves_latest,
                    )
                except RevisionBeingRemoved:
                    if attempt == _MOST_ATTEMPTS - 1:
                        raise
                self._let_removals_finish()
        raise AssertionError("unreachable")

    def pack(self, name: str, directory: Path, target: Path) -> PackedAdapter:
        """Packs a directory's content into the new file `target`, for workers that keep it in memory only.

        Changes nothing; `add_in_memory` does that. Raises as `import_directory`, StoreFull where `target` has no room.
        """
        self._checked(name)
        adapter = read_adapter(directory, self.base, self.limits)
        revision_id = revision_id_of(adapter)
        with room_at(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_packed(adapter, self.base, self.dtype, target)
        with target.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return PackedAdapter(Manifest.of(adapter), target, Envelope(revision_id, digest, target.stat().st_size))

    def add_in_memory(self, name: str, packed: PackedAdapter, alias: str, *, by: str | None = None) -> AdapterRevision:
        """Makes content that workers have in memory a revision without storing it, and points an alias at it, at once.

        Content that is in the store stays there, and the revision says so. Raises InvalidReference, and CatalogConflict
        for an adapter that is deleted and can still be restored.
        """
        tenant, short_name = self._checked(name)
        return self.catalog.add_revision(
            tenant,
            short_name,
            packed.manifest,
            packed.revision_id,
            packed.envelope.content_bytes,
            stored_since=None,
            by=by,
            moves_latest=False,
            alias=alias,
        )

    def export(self, reference: str, directory: Path) -> AdapterRevision:
        """Writes the revision that a reference stands for into the new directory `directory`; which one it was.

        Raises AdapterNotFound, and what `export_revision` raises.
        """
        revision = self.catalog.resolve(reference)
        self.export_revision(revision, directory)
        return revision

    def export_revision(self, revision: AdapterRevision, directory: Path) -> None:
        """Writes a revision into the new directory `directory`.

        It has the precision of the serving dtype (see `adapters.export`). Raises FileExistsError, RevisionNotStored,
        StoreCorrupt, and StoreFull where there is no room for it.
        """
        check_exportable(revision)
        with work_folder("export") as folder:
            path = folder / folder_of(revision.revision_id)
            self.store.fetch(revision.revision_id, path)
            with room_at(directory):
                export_packed(read_packed(path), directory)

    def collect_garbage(self, older_than: datetime) -> int:
        """Purges adapters deleted before `older_than` and removes the bytes that no adapter needs; how many revisions.

        One that was killed in between is finished by the next. Raises CatalogConflict while another one is under way.
        """
        with self.catalog.collecting() as check_still_collecting:
            revision_ids = self.catalog.collect_garbage(older_than)
            for some in _slices(revision_ids, _CONFIRMED_AT_A_TIME):
                for revision_id in some:
                    check_still_collecting()
                    self.store.delete(revision_id)
                self.catalog.confirm_removed(some)
        return len(revision_ids)

    def _checked(self, name: str) -> tuple[str, str]:
        try:
            if self.base_name is not None:
                check_not_base_model(name, self.base_name)
            return split_adapter_name(name)
        except ValueError as error:
            raise InvalidReference(str(error)) from None

    def _let_removals_finish(self) -> None:
        """Does what a collection that was killed has left to do; waits a little where one is at work."""
        try:
            self.collect_garbage(_BEFORE_ALL_DELETIONS)
        except CatalogConflict:
            self.catalog.wait_for_change(self.catalog.last_change(), _REMOVAL_WAIT_S)

    def fsck(self, min_age_s: float, *, repair: bool = False, check_content: bool = True) -> FsckReport:
        """Compares the store with the catalog. See `adapters.store.fsck`.

        Bytes that nothing refers to are removed as by a garbage collection, so that no import can build on them
        meanwhile; they stay where a collection is under way.
        """
        return fsck(
            self.store,
            self.catalog.referenced_revisions(),
            min_age_s,
            repair=repair,
            check_content=check_content,
            remove=self._removed,
        )

    def _removed(self, revision_id: str) -> bool:
        """Removes bytes without a row; False where they have got one, or where somebody else is collecting."""
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


def check_exportable(revision: AdapterRevision) -> None:
    """Raises RevisionNotStored for one that only workers have."""
    if not revision.stored:
        raise RevisionNotStored(
            f"{revision.full_name}@r{revision.number} is kept in workers' memory only, so there is nothing to "
            "export; import the same files to have it stored"
        )


def _slices(values: Sequence[str], size: int) -> list[Sequence[str]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
