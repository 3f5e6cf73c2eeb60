"""Two routers and one worker that has a memory-only revision: neither unpins what the other has a name for."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from support.adapters.held_adapters import StoredAdapters, Worker, announced, running_worker, sent

from router.revisions.memory_only import MemoryOnlyRevisions

NAME = "prefill-0"


class _Catalog:
    """What routers read in it: revisions, and whether a name points at them."""

    def __init__(self) -> None:
        self.is_kept: dict[str, bool] = {}

    def kept_in_memory(self, ids: Sequence[str]) -> dict[str, bool]:
        return {each: self.is_kept[each] for each in ids if each in self.is_kept}

    async def with_catalog(self, work: Callable[[Any], Any]) -> Any:
        return work(self)


class _Router:
    """A router's memory-only revisions; its calls go to a worker's real residency, when `may_call`."""

    def __init__(self, worker: Worker, catalog: _Catalog) -> None:
        self._worker = worker
        self.is_calling, self.may_call = asyncio.Event(), asyncio.Event()
        self.may_call.set()
        self.revisions = MemoryOnlyRevisions(self, catalog)  # type: ignore[arg-type]

    def workers_with_in_memory_only(self, only: object) -> dict[str, dict[str, bool]]:
        hub = self._worker.hub
        return {revision_id: {NAME: revision_id in hub.kept} for revision_id in hub.in_memory_only}

    def link(self, name: str) -> Self:
        return self

    async def pin_adapter(self, revision_id: str, pinned: bool, timeout_s: float) -> None:
        self.is_calling.set()
        await self.may_call.wait()
        if pinned:
            await self._worker.residency.pin(revision_id, timeout_s)
        else:
            self._worker.residency.unpin(revision_id)


@pytest.mark.parametrize("a_push_failed", [False, True])
async def test_a_name_that_another_router_has_given_meanwhile(
    stored: StoredAdapters, tmp_path: Path, a_push_failed: bool
):
    revision_id, *others = stored.ids
    envelope, content = announced(revision_id, stored.packed[revision_id])
    async with running_worker(stored, tmp_path, host=2) as worker:
        catalog = _Catalog()
        a, b = _Router(worker, catalog), _Router(worker, catalog)
        a.may_call.clear()
        await worker.residency.put(envelope, sent(content), 60)
        catalog.is_kept[revision_id] = False  # a name pointed at it once

        async def give_up() -> None:
            if not a_push_failed:
                return await a.revisions.reconcile()
            async with a.revisions.pushing(revision_id):
                await a.revisions.release(revision_id, [NAME])

        giving_up = asyncio.create_task(give_up())
        await a.is_calling.wait()  # it has read the catalog
        async with b.revisions.pushing(revision_id):
            assert await worker.residency.put(envelope, sent(content), 60)
            catalog.is_kept[revision_id] = True
        await b.revisions.reconcile()
        a.may_call.set()
        await giving_up
        for other in others:  # which would evict it
            await worker.residency.ensure(other, 60)
        assert revision_id in worker.hub.resident
