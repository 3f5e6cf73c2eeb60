"""Back up a catalog and the revisions that it needs, and restore them.

A backup lacks nothing that its catalog needs, though adapters are deleted and garbage is collected meanwhile (decision
12): the catalog is read, and its revisions are copied, while no collection may run. Rows that are read then have their
bytes, and nobody removes bytes. To keep that time short, what is new is copied once before.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field

from adapters.backup.folder import BackupFolder
from adapters.backup.rows import check_empty, copy_rows
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.locks import StillHeld
from adapters.files.work_folder import work_folder
from adapters.store import AdapterStore, RevisionNotStored, StoreCorrupt

_ABANDONED_S = 86400.0  # an unfinished write of a backup that was killed
_SHOWN = 5  # revisions in a message


@dataclass(slots=True)
class Outcome:
    """What a backup or a restore did."""

    catalog: str = ""  # its name in the folder
    num_revisions: int = 0  # that the catalog needs
    num_copied: int = 0
    num_unsigned: int = 0  # of those restored: without the signature of this cluster's key
    lacking: list[str] = field(default_factory=list)  # missing or damaged where they should come from


def back_up(catalog: SqlCatalog, store: AdapterStore, folder: BackupFolder, *, catalog_only: bool = False) -> Outcome:
    """Add the catalog of this instant to the folder, and the revisions that the folder lacks.

    Routers may serve and write; garbage collections and deletions of tenants are refused for a while. Raises ValueError
    if the folder is the store, CatalogConflict while a collection runs, CatalogUnavailable and StoreUnavailable: no
    catalog was added then, and the next backup goes on. Raises StoreCorrupt if the backup has all but what the store
    lacks.
    """
    if folder.url.rstrip("/") == store.url.rstrip("/"):
        raise ValueError(f"{folder.url} is the store itself; name another folder")
    for key in folder.store.incoming_older_than(_ABANDONED_S):
        folder.store.delete_incoming(key)
    outcome = Outcome()
    if not catalog_only:
        _copy(catalog.referenced_revisions(), store, folder.store, outcome)
        outcome.lacking.clear()  # deleted meanwhile, or found again below
    with work_folder("backup") as temporary, catalog.collecting() as check_still_collecting:
        file, taken_at = temporary / "catalog.db", catalog.now()
        with closing(SqlCatalog.open(f"sqlite:///{file}")) as copy:  # complete when the block has ended
            with catalog.snapshot() as rows:
                copy.write(lambda transaction: copy_rows(rows, transaction.connection))
            needed = list(copy.referenced_revisions())
        if not catalog_only:
            _copy(needed, store, folder.store, outcome, check_still_collecting)
        check_still_collecting()
        outcome.num_revisions, outcome.catalog = len(needed), folder.add_catalog(file, taken_at)
    if outcome.lacking:
        raise StoreCorrupt(
            f"{outcome.catalog} was added without {len(outcome.lacking)} revisions, which {store.url} lacks or has "
            f"damaged: {', '.join(outcome.lacking[:_SHOWN])}. Import them again, then back up again"
        )
    return outcome


def restore(
    folder: BackupFolder, catalog: SqlCatalog, store: AdapterStore, name: str = "", *, allow_missing: bool = False
) -> Outcome:
    """Fill an empty catalog with the one of that name, or the newest, and the store with the revisions that it lacks.

    All is verified before anything is written. `allow_missing`: restore the rest of a damaged backup. Raises
    StoreCorrupt with what is missing or damaged, CatalogConflict for a catalog with rows, CatalogTooNew, StoreFull.
    """
    with catalog.snapshot() as rows:
        check_empty(rows)
    with work_folder("backup") as temporary:
        outcome = Outcome(folder.fetch_catalog(name, temporary / "catalog.db"))
        with closing(SqlCatalog.open(f"sqlite:///{temporary}/catalog.db")) as kept, kept.snapshot() as rows:
            wanted = list(kept.referenced_revisions())
            absent = [each for each in wanted if not _is_intact(store, each)]
            present = [each for each in absent if _is_intact(folder.store, each)]
            outcome.num_revisions, outcome.lacking = len(wanted), sorted(set(absent).difference(present))
            if outcome.lacking and not allow_missing:
                raise StoreCorrupt(
                    f"{folder.url} lacks {len(outcome.lacking)} revisions of {outcome.catalog}, or they are damaged: "
                    f"{', '.join(outcome.lacking[:_SHOWN])}. Nothing was restored. Restore another catalog, with "
                    "--catalog, or the rest, with --allow-missing"
                )
            for revision_id in present:
                envelope = store.copy(revision_id, folder.store)
                outcome.num_copied += 1
                outcome.num_unsigned += store.signed(envelope) != envelope
            catalog.write(lambda transaction: copy_rows(rows, transaction.connection))
    return outcome


def _copy(
    needed: Iterable[str], source: AdapterStore, target: AdapterStore, outcome: Outcome, check: StillHeld = lambda: None
) -> None:
    """Copy the objects that the target lacks, or has in another size. `check` is called before each."""
    there, stored = ({each.revision_id: each.num_bytes for each in store.list()} for store in (target, source))
    for revision_id in needed:
        if revision_id in there and stored.get(revision_id) in (None, there[revision_id]):
            continue
        check()
        try:
            target.copy(revision_id, source)
            outcome.num_copied += 1
        except (RevisionNotStored, StoreCorrupt):
            outcome.lacking.append(revision_id)


def _is_intact(store: AdapterStore, revision_id: str) -> bool:
    try:
        store.verify(revision_id)
    except (RevisionNotStored, StoreCorrupt):
        return False
    return True
