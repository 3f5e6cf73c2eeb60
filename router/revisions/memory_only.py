"""Pins memory-only revisions on workers while an alias points to them, and unpins them when none does."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence, Set
from contextlib import asynccontextmanager

from adapters.errors import AdapterError
from router.errors import RouterError
from router.fleet.fleet import Fleet
from router.revisions.adapter_service import AdapterService

_INTERVAL_S = 30.0
_CALL_TIMEOUT_S = 5.0
_ABANDONED_S = 2 * 3600.0  # longer than any push takes; a revision without a catalog row is abandoned then

_WorkersOf = Mapping[str, Mapping[str, bool]]  # by revision, the workers that have it, and whether they keep it

log = logging.getLogger(__name__)


class MemoryOnlyRevisions:
    """Reconciles the workers' memory-only pins with the catalog, after each change by this router and periodically."""

    def __init__(self, fleet: Fleet, adapters: AdapterService) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._lock = asyncio.Lock()
        self._pushing: Counter[str] = Counter()  # revisions that this router is sending; no alias points to them yet
        self._unknown_since: dict[str, float] = {}  # by revision without a catalog row; the loop's clock

    async def run(self) -> None:
        """Reconcile periodically, for changes by the command line and by routers that have ended. Until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await self.reconcile()
            except Exception:  # the edge of this task
                log.exception("memory-only revisions not reconciled")

    @asynccontextmanager
    async def pushing(self, revision_id: str) -> AsyncIterator[None]:
        """Keep the revision pinned inside the block, whatever the catalog says."""
        async with self._lock:  # not while it is being unpinned
            self._pushing[revision_id] += 1
        try:
            yield
        finally:
            self._pushing[revision_id] -= 1
            if not self._pushing[revision_id]:
                del self._pushing[revision_id]

    async def reconcile(self, only: Set[str] | None = None) -> None:
        """Pin the memory-only revisions that an alias points to, on the workers that have them; unpin others.

        `only`: of these, whose aliases have changed; None: of all. Workers that report what is wanted are not called.
        A revision without a catalog row stays pinned until it counts as abandoned: another router may be pushing it.
        Failed calls are retried the next time. A revision in use is not evicted, pinned or not.
        """
        async with self._lock:
            workers_of = self._fleet.workers_with_in_memory_only(only)
            ids = [revision_id for revision_id in workers_of if revision_id not in self._pushing]
            is_kept = await self._kept(ids) if ids else {}
            if is_kept is None:
                return
            abandoned = self._abandoned(ids, is_kept) if only is None else ()
            wanted = {**dict.fromkeys(abandoned, False), **is_kept}
            due = {each: kept for each, kept in wanted.items() if (not kept) in workers_of[each].values()}
            await self._apply(due, workers_of)

    async def release(self, revision_id: str, workers: Collection[str]) -> None:
        """Unpin a revision on workers that a failed push of this router has pinned it on. Call it while `pushing`.

        It stays pinned if an alias points to it or may do so, or if another push of this router is sending it.
        """
        async with self._lock:
            if self._pushing[revision_id] > 1 or (is_kept := await self._kept([revision_id])) is None:
                return
            if not is_kept.get(revision_id):
                await self._apply({revision_id: False}, {revision_id: dict.fromkeys(workers, True)})

    async def forget(self, revision_id: str) -> None:
        """Unpin a revision whose catalog row is gone, wherever it is, unless it is pushed again or has a row again."""
        async with self.pushing(revision_id):
            await self.release(revision_id, self._fleet.workers_with_in_memory_only({revision_id}).get(revision_id, ()))

    async def _apply(self, is_pinned: Mapping[str, bool], workers_of: _WorkersOf) -> None:
        """Pin and unpin revisions, then pin again those that another router has pointed an alias to meanwhile.

        That router may have pinned them before our calls arrived, so it would not do so again for a while.
        """
        await self._pin_all(is_pinned, workers_of)
        if unpinned := [revision_id for revision_id, pinned in is_pinned.items() if not pinned]:
            again = dict.fromkeys((each for each, kept in (await self._kept(unpinned) or {}).items() if kept), True)
            await self._pin_all(again, {each: dict.fromkeys(workers_of[each], False) for each in again})

    async def _kept(self, ids: Sequence[str]) -> Mapping[str, bool] | None:
        """See `SqlCatalog.kept_in_memory`. None if the catalog does not answer."""
        try:
            return await self._adapters.with_catalog(lambda catalog: catalog.kept_in_memory(ids))
        except AdapterError as error:
            log.info("memory-only revisions not reconciled", extra={"fields": {"reason": str(error)}})
            return None

    async def _pin_all(self, is_pinned: Mapping[str, bool], workers_of: _WorkersOf) -> None:
        async with asyncio.TaskGroup() as group:
            for revision_id, pinned in is_pinned.items():
                for worker, is_kept in workers_of[revision_id].items():
                    if is_kept != pinned:
                        group.create_task(self._pin(worker, revision_id, pinned), name=f"pin on {worker}")

    def _abandoned(self, ids: list[str], known: Collection[str]) -> list[str]:
        """Revisions that have had no catalog row for longer than any push takes."""
        now = asyncio.get_running_loop().time()
        self._unknown_since = {each: self._unknown_since.get(each, now) for each in ids if each not in known}
        return [each for each, since in self._unknown_since.items() if now - since > _ABANDONED_S]

    async def _pin(self, worker: str, revision_id: str, pinned: bool) -> None:
        try:
            await self._fleet.link(worker).pin_adapter(revision_id, pinned, _CALL_TIMEOUT_S)
        except RouterError as error:
            fields = {"worker": worker, "revision": revision_id, "pinned": pinned, "reason": str(error)}
            log.info("memory-only revision: pin or unpin failed", extra={"fields": fields})
