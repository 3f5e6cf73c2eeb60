"""Resolve references from memory; the catalog's changes invalidate what they concern."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from adapters.catalog.records import AdapterRevision, Change
from adapters.catalog.sql.catalog import SqlCatalog
from adapters.errors import AdapterNotFound, CatalogUnavailable
from adapters.identity import AdapterReference

_POLL_S = 0.1  # a query takes less than a millisecond
_MAX_CHANGES = 1000  # at once; more of them clear the cache
_NOT_FOUND_SHARE = 4  # unknown references get a quarter of the entries: clients can make up any number

log = logging.getLogger(__name__)

_Adapter = tuple[str, str]  # tenant and name
_Outcome = AdapterRevision | str  # or the message of AdapterNotFound


class CachedResolver:
    """A cache of resolved references, for any number of threads. Between `start` and `close` a thread follows changes.

    A moved alias is seen within a second. While the catalog is unreachable, cached references keep resolving, without a
    limit; `staleness_s` tells for how long, and the beginning and the end are logged.
    """

    def __init__(
        self,
        catalog: SqlCatalog,
        *,
        max_entries: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
        on_changes: Callable[[Sequence[Change] | None], None] | None = None,
    ):
        """`on_changes` is called with each batch of changes, which may be empty, or None where some are unknown.

        It runs in any thread, one call at a time, and can raise CatalogUnavailable: then it is called again soon.
        """
        self._catalog = catalog
        self._on_changes = on_changes
        self._applying = threading.Lock()
        self._clock = clock
        self._lock = threading.Lock()
        self._found = _Entries(max_entries)
        self._not_found = _Entries(max(1, max_entries // _NOT_FOUND_SHARE))
        self._sequence: int | None = None  # the entries reflect all changes up to it; None: before the first
        self._known_at = float("-inf")  # when `_sequence` was last the newest change
        self._unreachable_since: float | None = None  # None: the last call succeeded
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start following the catalog's changes."""
        self._thread = threading.Thread(target=self._follow, name="catalog-changes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. The catalog stays open."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def staleness_s(self) -> float:
        """Seconds since the entries were known to be current; infinite before the first time."""
        return self._clock() - self._known_at

    def resolve(self, reference: str) -> AdapterRevision:
        """Resolve a reference. Raises InvalidReference, AdapterNotFound and CatalogUnavailable."""
        found = self.lookup(reference)
        return self._load(reference) if found is None else found

    def lookup(self, reference: str) -> AdapterRevision | None:
        """As `resolve`, but from memory alone; None for an unknown reference."""
        with self._lock:
            outcome = self._found.get(reference) or self._not_found.get(reference)
        if isinstance(outcome, str):
            raise AdapterNotFound(outcome)
        return outcome

    def refresh(self) -> None:
        """Apply all changes up to now. Raises CatalogUnavailable."""
        try:
            last = self._catalog.last_change()
            known_at = self._clock()
            with self._applying:  # so that `on_changes` sees batches in order
                if self._sequence is not None and last < self._sequence:  # another thread has applied newer ones
                    last = self._catalog.last_change()
                changes = self._invalidate(last, known_at)
                if self._on_changes is not None:
                    self._on_changes(changes)
        except CatalogUnavailable as error:
            self._mark_unreachable(error)
            raise

    def _follow(self) -> None:
        while True:
            try:
                self.refresh()
            except CatalogUnavailable:
                pass  # it is logged
            except Exception:  # the edge of this thread, without which every entry would go stale
                log.exception("following the catalog's changes failed")
            if self._stopping.wait(_POLL_S):
                return

    def _invalidate(self, last: int, known_at: float) -> Sequence[Change] | None:
        """Forget what the changes up to `last` concern. Returns them, None if some are unknown."""
        known = self._sequence
        changes: Sequence[Change] = ()
        if known is not None and last > known:
            changes = self._catalog.changes_since(known, _MAX_CHANGES)
        with self._lock:
            missed = known is not None and last > known and (not changes or changes[0].sequence != known + 1)
            is_unknown = known is None or last < known or missed or len(changes) == _MAX_CHANGES
            if is_unknown or any(change.kind == "tenants" for change in changes):
                # Also if the catalog has trimmed changes that are not applied yet, or went back, as after a backup's
                # restore: no entry can be trusted then.
                self._found.clear()
                self._not_found.clear()
                self._sequence = last if is_unknown else changes[-1].sequence
            elif changes:
                for change in changes:
                    if change.tenant is not None and change.name is not None:
                        self._found.forget((change.tenant, change.name))
                        self._not_found.forget((change.tenant, change.name))
                self._sequence = changes[-1].sequence
            self._known_at = known_at
            unreachable_since, self._unreachable_since = self._unreachable_since, None
        if unreachable_since is not None:
            log.warning(
                "catalog reachable again", extra={"fields": {"unreachable_s": round(known_at - unreachable_since, 3)}}
            )
        return None if is_unknown else changes

    def _mark_unreachable(self, error: CatalogUnavailable) -> None:
        with self._lock:
            if self._unreachable_since is not None:
                return
            self._unreachable_since = self._clock()
        log.warning("catalog unreachable, serving cached names", extra={"fields": {"reason": str(error)}})

    def _load(self, reference: str) -> AdapterRevision:
        wanted = AdapterReference.parse(reference)
        if self._unreachable_since is not None:  # fail fast, instead of a timeout per request
            raise CatalogUnavailable(
                f"{str(wanted)!r} cannot be resolved while the catalog's database does not answer; try again"
            )
        sequence = self._sequence
        outcome: _Outcome
        try:
            outcome = self._catalog.resolve_parsed(wanted)
        except AdapterNotFound as error:
            outcome = str(error)
        with self._lock:
            # An outcome from before a change that was applied meanwhile may be stale, and would stay cached.
            if sequence is not None and sequence == self._sequence:
                entries = self._not_found if isinstance(outcome, str) else self._found
                entries.put(reference, (wanted.tenant, wanted.name), outcome)
        if isinstance(outcome, str):
            raise AdapterNotFound(outcome)
        return outcome


class _Entries:
    """An LRU map from references to outcomes. The caller holds the lock."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._outcomes: OrderedDict[str, tuple[_Adapter, _Outcome]] = OrderedDict()
        self._references: dict[_Adapter, set[str]] = {}

    def get(self, reference: str) -> _Outcome | None:
        entry = self._outcomes.get(reference)
        if entry is None:
            return None
        self._outcomes.move_to_end(reference)
        return entry[1]

    def put(self, reference: str, adapter: _Adapter, outcome: _Outcome) -> None:
        self._outcomes[reference] = adapter, outcome
        self._outcomes.move_to_end(reference)
        self._references.setdefault(adapter, set()).add(reference)
        while len(self._outcomes) > self._capacity:
            oldest, (of, _) = self._outcomes.popitem(last=False)
            self._references[of].discard(oldest)
            if not self._references[of]:
                del self._references[of]

    def forget(self, adapter: _Adapter) -> None:
        for reference in self._references.pop(adapter, ()):
            del self._outcomes[reference]

    def clear(self) -> None:
        self._outcomes.clear()
        self._references.clear()
