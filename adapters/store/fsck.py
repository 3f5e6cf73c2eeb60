"""Compare a store with the catalog that refers to it, and repair the store."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from adapters.store.errors import RevisionNotStored, StoreCorrupt
from adapters.store.store import AdapterStore, StoredObject

MAX_LISTED = 1000  # of each kind of finding; all are counted


@dataclass(slots=True)
class Findings:
    """Revision ids or keys of one kind."""

    count: int = 0
    listed: list[str] = field(default_factory=list)  # the first MAX_LISTED

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(name)


@dataclass(slots=True)
class FsckReport:
    """What a check found, before any repair."""

    num_referenced: int = 0
    num_objects: int = 0
    num_bytes: int = 0  # of the revisions' objects
    num_young: int = 0  # unreferenced, but too young: an import may be about to refer to them
    missing: Findings = field(default_factory=Findings)  # referenced, and not stored
    corrupt: Findings = field(default_factory=Findings)
    unreferenced: Findings = field(default_factory=Findings)
    left_over: Findings = field(default_factory=Findings)
    num_repaired: int = 0  # moved to quarantine/ or deleted

    @property
    def is_sound(self) -> bool:
        """True if every referenced revision can be served."""
        return not self.missing.count and not self.corrupt.count


def fsck(
    store: AdapterStore,
    referenced: Iterable[str],
    min_age_s: float,
    remove: Callable[[str], bool],
    *,
    repair: bool = False,
    check_content: bool = True,
) -> FsckReport:
    """Compare the store with the revision ids that a catalog refers to, which ascend.

    Nothing younger than `min_age_s` counts as unreferenced or left over, because its import may still run. `repair`
    deletes left-over objects, moves corrupt ones to quarantine/, and has `remove` delete unreferenced ones, which
    returns False for one that is referenced by now. Without `check_content`, objects are listed but not read. Raises
    StoreUnavailable.
    """
    report = FsckReport()
    for revision_id, is_referenced, found in _merged(iter(referenced), store.list()):
        report.num_referenced += is_referenced
        if found is None:
            found = store.find(revision_id)  # it may have been published since its shard was listed
        if found is None:
            report.missing.add(revision_id)
            continue
        report.num_objects += 1
        report.num_bytes += found.num_bytes
        if check_content:
            try:
                store.verify(revision_id)
            except StoreCorrupt:
                report.corrupt.add(revision_id)
                # Else it has been replaced meanwhile.
                if repair and store.find(revision_id) == found and store.quarantine(revision_id):
                    report.num_repaired += 1
                continue
            except RevisionNotStored:  # deleted meanwhile
                if is_referenced:
                    report.missing.add(revision_id)
                continue
        if is_referenced:
            continue
        if found.modified_s > time.time() - min_age_s:
            report.num_young += 1
            continue
        report.unreferenced.add(revision_id)
        if repair and store.find(revision_id) == found and remove(revision_id):  # else published again meanwhile
            report.num_repaired += 1
    for key in store.incoming_older_than(min_age_s):
        report.left_over.add(key)
        if repair:
            store.delete_incoming(key)
            report.num_repaired += 1
    return report


def _merged(
    referenced: Iterator[str], stored: Iterator[StoredObject]
) -> Iterator[tuple[str, bool, StoredObject | None]]:
    """Merge both ascending sequences into (revision id, whether it is referenced, its object)."""
    wanted, found = next(referenced, None), next(stored, None)
    while wanted is not None or found is not None:
        if found is None or (wanted is not None and wanted < found.revision_id):
            assert wanted is not None
            yield wanted, True, None
            wanted = next(referenced, None)
        elif wanted == found.revision_id:
            yield wanted, True, found
            wanted, found = next(referenced, None), next(stored, None)
        else:
            yield found.revision_id, False, found
            found = next(stored, None)
