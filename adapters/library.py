"""Managed adapters: the catalog and the store as one, so that what the catalog names is always in the store.

The order is what makes a crash harmless. In: bytes first, then the row. Out: the row first, then the bytes.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.errors import InvalidReference, RevisionBeingRemoved
from adapters.formats import Limits, read_adapter
from adapters.identity import folder_of, split_adapter_name
from adapters.manifest import Manifest, revision_id_of
from adapters.normal_form import Adapter
from adapters.packed import write_packed
from adapters.serving import EngineDtype
from adapters.store import AdapterStore
from adapters.store.fsck import FsckReport, fsck

_MOST_ATTEMPTS = 5  # of an import whose bytes a garbage collection is taking out


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

    def import_directory(
        self, name: str, directory: Path, *, by: str | None = None, moves_latest: bool = True
    ) -> AdapterRevision:
        """Makes a directory's content a revision of the adapter `name` or `tenant/name`. See `add`.

        Raises InvalidReference, and what `read_adapter` raises.
        """
        try:
            split_adapter_name(name)
        except ValueError as error:
            raise InvalidReference(str(error)) from None
        return self.add(name, read_adapter(directory, self.base, self.limits), by=by, moves_latest=moves_latest)

    def add(self, name: str, adapter: Adapter, *, by: str | None = None, moves_latest: bool = True) -> AdapterRevision:
        """Makes an adapter's content a revision, the latest one unless `moves_latest` is False.

        Content that the adapter already has keeps its number. Raises AdapterIncompatible where it does not fit the
        serving dtype, CatalogConflict for an adapter that is deleted and can still be restored.
        """
        tenant, short_name = split_adapter_name(name)
        revision_id, manifest = revision_id_of(adapter), Manifest.of(adapter)
        with tempfile.TemporaryDirectory(prefix="prelude-import-") as folder:
            packed = Path(folder) / folder_of(revision_id)
            write_packed(adapter, self.base, self.dtype, packed)
            for attempt in range(_MOST_ATTEMPTS):
                stored_since = self.catalog.last_change()
                self.store.publish(revision_id, packed)
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
        raise AssertionError("unreachable")

    def collect_garbage(self, older_than: datetime) -> int:
        """Purges adapters deleted before `older_than` and removes the bytes that no adapter needs; how many revisions.

        One that was killed in between is finished by the next.
        """
        revision_ids = self.catalog.collect_garbage(older_than)
        for revision_id in revision_ids:
            self.store.delete(revision_id)
        self.catalog.confirm_removed(revision_ids)
        return len(revision_ids)

    def fsck(self, min_age_s: float, *, repair: bool = False, check_content: bool = True) -> FsckReport:
        """Compares the store with the catalog. See `adapters.store.fsck`."""
        return fsck(
            self.store, self.catalog.referenced_revisions(), min_age_s, repair=repair, check_content=check_content
        )
