"""Revisions that no store has: workers keep them while an alias stands for them, and give them up when none does."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapters.errors import AdapterError
from router.errors import RouterError
from router.fleet.fleet import Fleet
from router.revisions.adapter_service import AdapterService

_EVERY_S = 30.0
_CALL_TIMEOUT_S = 5.0
_UNKNOWN_FOR_S = 2 * 3600.0  # that a push can take at most, and more: then it was given up

log = logging.getLogger(__name__)


class MemoryOnlyRevisions:
    """Brings what workers keep in step with the catalog: after each change of this router's, and every now and then."""

    def __init__(self, fleet: Fleet, adapters: AdapterService) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._turn = asyncio.Lock()
        self._pushing: Counter[str] = Counter()  # what this router is sending: no alias stands for it yet
        self._unknown_since: dict[str, float] = {}  # revisions that the catalog does not know, by the loop's clock

    async def run(self) -> None:
        """For what others have changed: the command line, and routers that have ended. Runs until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.settle()
            except Exception:  # the edge of this task
                log.exception("what workers keep in memory only was not settled")

    @asynccontextmanager
    async def pushing(self, revision_id: str) -> AsyncIterator[None]:
        """Inside, the revision is kept, whatever the catalog says."""
        async with self._turn:  # not while it is being given up
            self._pushing[revision_id] += 1
        try:
            yield
        finally:
            self._pushing[revision_id] -= 1
            if not self._pushing[revision_id]:
                del self._pushing[revision_id]

    async def settle(self) -> None:
        """Has workers keep what an alias stands for and no store has, and give up the rest that they were sent.

        What fails is tried again the next time. Requests that use a revision keep it from eviction, pinned or not.
        """
        async with self._turn:
            where = self._fleet.workers_with_in_memory_only()
            ids = [revision_id for revision_id in where if revision_id not in self._pushing]
            if not ids:
                self._unknown_since.clear()
                return
            try:
                known = await self._adapters.with_catalog(lambda catalog: catalog.kept_in_memory(ids))
            except AdapterError as error:
                log.info("what workers keep in memory only is not known", extra={"fields": {"reason": str(error)}})
                return
            wanted = {**dict.fromkeys(self._given_up(ids, known), False), **known}
            async with asyncio.TaskGroup() as group:
                for revision_id, is_wanted in wanted.items():
                    for worker in where[revision_id]:
                        group.create_task(self._tell(worker, revision_id, is_wanted), name=f"keep on {worker}")

    def _given_up(self, ids: list[str], known: dict[str, bool]) -> list[str]:
        """Those that the catalog has not known for so long that nobody can be pushing them any more."""
        now = asyncio.get_running_loop().time()
        self._unknown_since = {each: self._unknown_since.get(each, now) for each in ids if each not in known}
        return [each for each, since in self._unknown_since.items() if now - since > _UNKNOWN_FOR_S]

    async def _tell(self, worker: str, revision_id: str, is_wanted: bool) -> None:
        try:
            await self._fleet.link(worker).pin_adapter(revision_id, is_wanted, _CALL_TIMEOUT_S, memory_only=True)
        except RouterError as error:
            fields = {"worker": worker, "revision": revision_id, "wanted": is_wanted, "reason": str(error)}
            log.info("worker was not told what to keep in memory only", extra={"fields": fields})
