"""Resolves references from memory, and keeps what it has in step with the catalog's changes."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from adapters.catalog.records import AdapterRevision, Change
from adapters.errors import AdapterNotFound, CatalogUnavailable
from adapters.identity import AdapterReference

_WAIT_S = 0.5  # for a change, at a time
_RETRY_S = 0.2  # after the catalog did not answer
_MAX_CHANGES = 1000  # more of them at a time empty the cache
_NOT_FOUND_SHARE = 4  # a quarter as many references that stand for nothing are kept: clients make them up at will

log = logging.getLogger(__name__)

_Adapter = tuple[str, str]  # tenant and name
_Outcome = AdapterRevision | str  # or the message of AdapterNotFound


class ResolvableCatalog(Protocol):
    """What the cache asks of a catalog. Every method can raise CatalogUnavailable."""

    def resolve_parsed(self, wanted: AdapterReference) -> AdapterRevision: ...

    def last_change(self) -> int: ...

    def changes_since(self, sequence: int, limit: int = 1000) -> Sequence[Change]: ...

    def wait_for_change(self, after: int, timeout_s: float) -> int: ...


class CachedResolver:
    """Resolves references for any number of threads. Between `start` and `close` a thread follows the changes.

    A moved alias is seen within a second. While the catalog does not answer, references that were resolved before stand
    for what they stood for, however long that lasts; `staleness_s` says how long, and the log when it begins and ends.
    """

    def __init__(
        self,
        catalog: ResolvableCatalog,
        *,
        max_entries: int = 100_000,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._catalog = catalog
        self._clock = clock
        self._lock = threading.Lock()
        self._found = _Entries(max_entries)
        self._not_found = _Entries(max(1, max_entries // _NOT_FOUND_SHARE))
        self._sequence: int | None = None  # all changes up to it are in the entries; None: nothing is known yet
        self._known_at = float("-inf")  # when that was last so
        self._silent_since: float | None = None  # the catalog has not answered since; None: it did when last asked
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to follow the changes."""
        self._thread = threading.Thread(target=self._follow, name="catalog-changes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. The catalog stays open."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> CachedResolver:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def staleness_s(self) -> float:
        """Seconds since all changes of the catalog were known; infinite before the first time."""
        return self._clock() - self._known_at

    def resolve(self, reference: str) -> AdapterRevision:
        """The revision that a reference stands for. Raises InvalidReference, AdapterNotFound, CatalogUnavailable."""
        found = self.lookup(reference)
        return self._load(reference) if found is None else found

    def lookup(self, reference: str) -> AdapterRevision | None:
        """As `resolve` from memory alone; None where that does not know."""
        with self._lock:
            outcome = self._found.get(reference) or self._not_found.get(reference)
        if isinstance(outcome, str):
            raise AdapterNotFound(outcome)
        return outcome

    def refresh(self) -> None:
        """Takes in all changes up to now. Raises CatalogUnavailable."""
        self._take_in(self._catalog.last_change)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self._take_in(self._wait)
            except CatalogUnavailable:
                self._stopping.wait(_RETRY_S)
            except Exception:  # the edge of this thread, without which every name would grow stale
                log.exception("following the catalog's changes failed")
                self._stopping.wait(_RETRY_S)

    def _wait(self) -> int:
        if self._sequence is None or self._silent_since is not None:
            return self._catalog.last_change()
        return self._catalog.wait_for_change(self._sequence, _WAIT_S)

    def _take_in(self, newest: Callable[[], int]) -> None:
        try:
            last = newest()
            known_at = self._clock()
            known = self._sequence
            changes: Sequence[Change] = ()
            if known is not None and last > known:
                changes = self._catalog.changes_since(known, _MAX_CHANGES)
        except CatalogUnavailable as error:
            self._fell_silent(error)
            raise
        with self._lock:
            missed = known is not None and last > known and (not changes or changes[0].sequence != known + 1)
            if known is None or last < known or missed or len(changes) == _MAX_CHANGES:
                # Also where the catalog has forgotten changes that are not here yet, and where it went back, as after
                # it was restored from a copy: nothing here holds any more.
                self._found.clear()
                self._not_found.clear()
                self._sequence = last
            elif changes:
                for change in changes:
                    if change.tenant is not None and change.name is not None:
                        self._found.forget((change.tenant, change.name))
                        self._not_found.forget((change.tenant, change.name))
                self._sequence = changes[-1].sequence
            self._known_at = known_at
            silent_since, self._silent_since = self._silent_since, None
        if silent_since is not None:
            log.warning("the catalog answers again", extra={"fields": {"silent_s": round(known_at - silent_since, 3)}})

    def _fell_silent(self, error: CatalogUnavailable) -> None:
        with self._lock:
            if self._silent_since is not None:
                return
            self._silent_since = self._clock()
        log.warning("the catalog does not answer, known names go on", extra={"fields": {"reason": str(error)}})

    def _load(self, reference: str) -> AdapterRevision:
        wanted = AdapterReference.parse(reference)
        if self._silent_since is not None:  # at once, instead of after a time-out for each request
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
            # What was asked before a change that has been taken in since may be out of date, and would stay.
            if sequence is not None and sequence == self._sequence:
                entries = self._not_found if isinstance(outcome, str) else self._found
                entries.put(reference, (wanted.tenant, wanted.name), outcome)
        if isinstance(outcome, str):
            raise AdapterNotFound(outcome)
        return outcome


class _Entries:
    """Outcomes by reference; the least recently used go first. Whoever calls holds the lock."""

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
