"""The host memory tier: one folder per adapter in shared memory, mapped by every tensor-parallel rank of the engine.

Room is reserved before anything is written, so the folders never exceed the budget. Eviction is LRU over the adapters
that are not pinned, leased or held.
"""

import asyncio
import itertools
import logging
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from adapters.errors import AdapterTooLarge, HostExhausted
from adapters.identity import folder_of
from adapters.packed import PACKED_NAME, kept_directory
from cluster.control.worker_state import WorkerStateHub
from engine.client import IN_USE, EngineClient
from engine.errors import EngineError
from prefill_worker.residency.errors import AdapterInUse, HostMemoryFull
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import WorkThreads, wait_until_done
from prefill_worker.residency.tiers.evict_ahead import EvictAhead
from prefill_worker.residency.tiers.host_entry import HostEntry, HostState
from prefill_worker.residency.tiers.pins import Pins
from prefill_worker.residency.tiers.spare_folders import SpareFolders
from process.exhaustion import is_disk_full

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_RETRY_S = (0.02, 0.5)  # first and longest pause between rounds: the engine does not announce releases, so we poll
_UNLOAD_TIMEOUT_S = 30.0
_MAX_REFUSALS = 8  # by the engine, in one round
_MAX_CONCURRENT = 8  # evictions
_RETRY_AFTER_S = 1.0


class HostMemory:
    """Owns the folders. Says in `hub` what the engine and this memory no longer hold."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        threads: WorkThreads,
        engine: EngineClient,
        hub: WorkerStateHub,
        metrics: ResidencyMetrics,
        *,
        reuses_folders: bool = False,
    ) -> None:
        """`reuses_folders`: write adapters over evicted ones. Only if nobody reads one that the engine has unloaded."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.pins = Pins(budget_bytes, on_unpinned=self._notify)
        self._root = root
        self._threads = threads
        self._engine = engine
        self._hub = hub
        self._metrics = metrics
        self._entries: OrderedDict[str, HostEntry] = OrderedDict()  # least recently used first
        self._folder_numbers = itertools.count(1)
        self._eviction_lock = asyncio.Lock()
        self._wanted_bytes = 0  # of reservations in progress
        self._evicting_bytes = 0
        self._reuses_folders = reuses_folders
        self._spares = SpareFolders()
        self._ahead = EvictAhead()
        self._ahead_bytes = 0  # goal of the next round of eviction ahead
        self._ahead_task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[HostEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, revision_id: str) -> HostEntry | None:
        return self._entries.get(revision_id)

    def resident(self, revision_id: str) -> HostEntry | None:
        """The entry, if the engine can use it."""
        entry = self._entries.get(revision_id)
        return entry if entry is not None and entry.state is HostState.RESIDENT else None

    def use(self, entry: HostEntry, lease_s: float) -> None:
        """Mark an entry as most recently used, and lease it for `lease_s`."""
        self._entries.move_to_end(entry.revision_id)
        entry.lease_until_s = max(entry.lease_until_s, asyncio.get_running_loop().time() + lease_s)

    @contextmanager
    def held(self, entry: HostEntry) -> Iterator[None]:
        """Keep an entry from eviction inside the context."""
        entry.num_holds += 1
        try:
            yield
        finally:
            entry.num_holds -= 1
            self._notify()

    def set_state(self, entry: HostEntry, state: HostState) -> None:
        """Record the progress of a load."""
        entry.state = state
        self._notify()

    async def settled(self, revision_id: str) -> HostEntry | None:
        """Wait for an eviction of the revision to end; the entry, if there still is one."""
        while (entry := self._entries.get(revision_id)) is not None and entry.state is HostState.EVICTING:
            await self._wait_for_change()
        return entry

    async def reserve(
        self, revision_id: str, content_bytes: int, on_blocked: Callable[[HostMemoryFull | None], None]
    ) -> HostEntry:
        """Create an entry with room for a packed file of `content_bytes`, evicting others without a time limit.

        `on_blocked` gets the reason while nothing can be evicted, and None once there is room. Raises AdapterTooLarge
        if the file exceeds the whole budget.
        """
        num_bytes = room_bytes(content_bytes)
        if num_bytes > self.budget_bytes:
            raise AdapterTooLarge(
                f"{revision_id} takes {num_bytes} bytes of host memory, more than this worker's "
                f"residency.host_bytes of {self.budget_bytes}; raise it"
            )
        if self._eviction_lock.locked():
            on_blocked(self._full(revision_id, num_bytes))
        is_short = self._ahead.reserve(revision_id, num_bytes, -self._short_bytes())
        self._wanted_bytes += num_bytes
        self._spares.want(num_bytes)
        if is_short:
            self._evict_ahead(num_bytes)
        try:
            async with self._eviction_lock:  # first come, first served: small adapters do not starve a large one
                pause_s = _RETRY_S[0]
                while self.used_bytes + num_bytes > self.budget_bytes:
                    lease_end_s = self._next_lease_end()  # read first: it may pass during the round
                    if await self._make_room():
                        pause_s = _RETRY_S[0]
                        continue
                    on_blocked(self._full(revision_id, num_bytes))
                    await self._wait_for_change(min(pause_s, lease_end_s - asyncio.get_running_loop().time()))
                    pause_s = min(2 * pause_s, _RETRY_S[1])
                on_blocked(None)
                if not self._spares.has(num_bytes):
                    await self._drop_spares(self.budget_bytes - self.used_bytes - num_bytes)
                directory = self._root / f"{folder_of(revision_id)}.{next(self._folder_numbers)}"
                entry = HostEntry(revision_id, directory, num_bytes, spare=self._spares.take(num_bytes))
                self._entries[revision_id] = entry
                self.used_bytes += num_bytes
        finally:
            self._wanted_bytes -= num_bytes
            self._spares.want_no_more(num_bytes)
            self._ahead.limit(-self._short_bytes())
        return entry

    @asynccontextmanager
    async def filling(self, entry: HostEntry) -> AsyncIterator[None]:
        """Write a reserved entry's file inside the context. A failure leaves nothing.

        Raises HostMemoryFull if shared memory is full before the budget is; one adapter is evicted for the next try.
        """
        try:
            yield
        except BaseException as error:
            await self.discard(entry)
            if is_disk_full(error):
                if self._spares.num_bytes:
                    await self._drop_spares(0)
                else:
                    async with self._eviction_lock:
                        await self._evict_some(1)
                raise HostMemoryFull(
                    f"{self._root.parent} has no room for {entry.revision_id} ({error.strerror}) although "
                    "residency.host_bytes has: lower it, or give this worker more shared memory"
                ) from error
            if isinstance(error, OSError):
                HostExhausted.check(error)
            raise
        self.set_state(entry, HostState.IN_MEMORY)

    async def discard(self, entry: HostEntry) -> None:
        """Remove an entry whose load failed or that the engine refused."""
        try:
            await self._threads.run_to_end(lambda: _remove(entry.directory, entry.spare))
        finally:
            self._forget(entry)

    async def aclose(self) -> None:
        """Stop evicting ahead."""
        self._is_closed = True
        if self._ahead_task is not None:
            self._ahead_task.cancel()
            await asyncio.wait([self._ahead_task])

    def engine_gone(self) -> None:
        """The engine ended: it holds no adapter any more."""
        for entry in self._entries.values():
            entry.may_be_in_engine = False
            if entry.state is HostState.RESIDENT:
                entry.state = HostState.IN_MEMORY
        self._notify()

    def mark_unloaded(self, revision_id: str) -> None:
        """The engine reports that it does not hold a revision that it has loaded."""
        if (entry := self.resident(revision_id)) is not None:
            entry.state = HostState.IN_MEMORY
            self._hub.remove_resident(revision_id)
            self._notify()

    async def evict(self, revision_id: str) -> bool:
        """Evict an adapter; False if it is not in memory. Raises AdapterInUse and EngineError."""
        await self._drop_spares(0)  # what is evicted by name leaves nothing behind
        while (entry := await self.settled(revision_id)) is not None and entry.num_holds:
            await self._wait_for_change()  # it is being copied to the disk
        if entry is None:
            return False
        if reason := self._why_not_evictable(entry):
            raise AdapterInUse(f"{revision_id} is {reason}; it cannot be evicted now")
        [is_evicted] = await _results([self._evict(entry, is_by_name=True)])
        await self._drop_spares(0)  # of the same revision, if it was being evicted already
        if not is_evicted:
            raise AdapterInUse(f"{revision_id} is in use by requests; try again when they have ended")
        return True

    async def _make_room(self) -> bool:
        """Evict for all waiting reservations; True if there may be more room now."""
        if (short_bytes := self._short_bytes()) > 0:
            return await self._evict_some(short_bytes)
        await self._wait_for_change()  # evictions in progress will free enough
        return True

    def _short_bytes(self) -> int:
        """Bytes that waiting reservations lack once the evictions in progress are done; negative if some stay free."""
        return self.used_bytes - self._evicting_bytes + self._wanted_bytes - self.budget_bytes

    def _evict_ahead(self, num_bytes: int) -> None:
        """Start to evict for the next reservations, after one of `num_bytes` was short.

        The engine loads and unloads only between two batches. A load that has to evict first waits for two of them.
        """
        self._ahead_bytes = self._ahead.goal_bytes(num_bytes, self.budget_bytes - self.pins.num_bytes)
        if not self._is_closed and (self._ahead_task is None or self._ahead_task.done()):
            self._ahead_task = asyncio.create_task(self._run_evict_ahead(), name="evict ahead")
            self._ahead_task.add_done_callback(_log_failure)

    async def _run_evict_ahead(self) -> None:
        while self._ahead_bytes:
            ahead_bytes, self._ahead_bytes = self._ahead_bytes, 0
            await self._evict_some(self._short_bytes(), ahead_bytes)

    async def _evict_some(self, num_bytes: int, ahead_bytes: int = 0) -> bool:
        """Evict adapters of about `num_bytes` and, ahead of demand, `ahead_bytes` more; True if any was evicted."""
        refused: set[HostEntry] = set()
        while len(refused) < _MAX_REFUSALS and (victims := self._victims(num_bytes, ahead_bytes, refused)):
            if any(await _results([self._evict(entry, is_ahead) for entry, is_ahead in victims.items()])):
                return True
            refused.update(victims)
        return False

    def _victims(self, num_bytes: int, ahead_bytes: int, refused: set[HostEntry]) -> dict[HostEntry, bool]:
        """The least recently used evictable entries; the value is True for those evicted ahead of demand."""
        victims: dict[HostEntry, bool] = {}
        lacking_bytes = num_bytes + ahead_bytes
        for entry in self._entries.values():
            if lacking_bytes <= 0 or len(victims) == _MAX_CONCURRENT:
                break
            if entry in refused or self._why_not_evictable(entry):
                continue
            is_ahead = lacking_bytes <= ahead_bytes
            if is_ahead and entry.num_bytes > lacking_bytes:
                break  # room for small adapters is no reason to evict a large one
            victims[entry] = is_ahead
            lacking_bytes -= entry.num_bytes
        return victims

    def _why_not_evictable(self, entry: HostEntry) -> str:
        """Why an entry cannot be evicted; empty if it can, unless requests use it, which only the engine knows."""
        if entry.state in (HostState.LOADING, HostState.EVICTING):
            return f"being {'loaded' if entry.state is HostState.LOADING else 'evicted'}"
        if entry.revision_id in self.pins:
            return "pinned"
        if entry.num_holds:
            return "being copied or loaded"
        if asyncio.get_running_loop().time() < entry.lease_until_s:
            return "leased to a request"
        return ""

    def _next_lease_end(self) -> float:
        """When the first of the leases ends, in the event loop's time; infinite without any."""
        now = asyncio.get_running_loop().time()
        ends = (each.lease_until_s for each in self._entries.values() if each.lease_until_s > now)
        return min(ends, default=math.inf)

    def _evict(self, entry: HostEntry, is_ahead: bool = False, is_by_name: bool = False) -> asyncio.Task[bool]:
        """Start to unload an entry and remove it. The task returns False if the engine still uses it."""
        before, entry.state = entry.state, HostState.EVICTING
        self._evicting_bytes += entry.num_bytes
        is_wanted = is_ahead or self._spares.is_wanted(entry.num_bytes)
        may_keep = self._reuses_folders and is_wanted and not is_by_name and not entry.is_shared
        return asyncio.create_task(
            self._evict_now(entry, before, is_ahead, may_keep), name=f"evict {entry.revision_id}"
        )

    async def _evict_now(self, entry: HostEntry, before: HostState, is_ahead: bool, may_keep: bool) -> bool:
        # No await after the entry's removal or restoration: the counts change together with it.
        try:
            is_evicted = await self._unload_and_remove(entry, before, may_keep)
        finally:
            self._evicting_bytes -= entry.num_bytes
        if is_evicted and is_ahead:
            self._ahead.add(entry.revision_id, entry.num_bytes)
        self._ahead.limit(-self._short_bytes())
        return is_evicted

    async def _unload_and_remove(self, entry: HostEntry, before: HostState, may_keep: bool) -> bool:
        # Hidden first: on a request the engine reloads an adapter that it once held, from the folder that it remembers.
        name = f"{entry.directory.name}.evicting"
        hidden = kept_directory(entry.directory) if may_keep else entry.directory.with_name(name)
        is_unloaded = False
        try:
            with suppress(FileNotFoundError):  # removed by somebody else: the engine cannot reload it either
                entry.directory.rename(hidden)
            if entry.may_be_in_engine:
                is_unloaded = await self._engine.unload_adapter(entry.revision_id, _UNLOAD_TIMEOUT_S)
        except Exception as error:
            log.debug("eviction refused", extra={"fields": {"revision": entry.revision_id, "reason": str(error)}})
            with suppress(FileNotFoundError):
                hidden.rename(entry.directory)
            # Not so if the engine ended meanwhile, nor if it did not answer: it may have unloaded the adapter.
            is_resident = before is HostState.RESIDENT and entry.may_be_in_engine and IN_USE in str(error)
            if before is HostState.RESIDENT and not is_resident:
                self._hub.remove_resident(entry.revision_id)
            entry.state = HostState.RESIDENT if is_resident else HostState.IN_MEMORY
            self._entries.move_to_end(entry.revision_id)  # in use, so most recently used
            self._notify()
            if not isinstance(error, EngineError):
                raise
            return False
        if before is HostState.RESIDENT:
            self._hub.remove_resident(entry.revision_id)
        entry.directory = hidden
        # An engine may have mapped the file although it has not confirmed that it let go: a load that was given up can
        # end late. Such a file is never written over; deleted, it stays what it was for whoever has it mapped.
        if may_keep and is_unloaded:
            self._spares.add(hidden, entry.num_bytes)
            self._forget(entry)
        else:
            await self.discard(entry)
        self._metrics.count_eviction("host")
        return True

    async def _drop_spares(self, max_bytes: int) -> None:
        """Delete spare folders until those that are left take at most `max_bytes`."""

        def delete() -> None:
            for each in dropped:
                with suppress(OSError):  # the engine has the file mapped for a moment more: this frees the memory now
                    os.truncate(each / PACKED_NAME, 0)
            _remove(*dropped)

        if dropped := self._spares.drop(max_bytes):
            await self._threads.run_to_end(delete)

    def _forget(self, entry: HostEntry) -> None:
        if self._entries.get(entry.revision_id) is entry:
            del self._entries[entry.revision_id]
            self.used_bytes -= entry.num_bytes
            self._hub.remove_in_memory_only(entry.revision_id)
        self._notify()

    def _full(self, revision_id: str, num_bytes: int) -> HostMemoryFull:
        return HostMemoryFull(
            f"host memory has no room for the {num_bytes} bytes of {revision_id}: all {len(self._entries)} adapters in "
            f"its {self.budget_bytes} bytes (residency.host_bytes) are in use, leased or pinned; try again",
            _RETRY_AFTER_S,
        )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for_change(self, within_s: float | None = None) -> None:
        """Wait for the next `_notify`, at most `within_s`."""
        changed = self._changed
        try:
            async with asyncio.timeout(within_s):
                await changed.wait()
        except TimeoutError:
            pass


def room_bytes(content_bytes: int) -> int:
    """Host memory that a packed file of `content_bytes` takes, its folder's adapter_config.json included."""
    return -(-content_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES


async def _results(evictions: Sequence[asyncio.Task[bool]]) -> list[bool]:
    """Wait for all, even when cancelled: none may stop half-way. The engine's timeout bounds the wait."""
    try:
        await asyncio.wait(evictions)
    except asyncio.CancelledError:
        for each in evictions:
            await wait_until_done(each)
        raise
    return await asyncio.gather(*evictions)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("eviction ahead failed", exc_info=error)


def _remove(*directories: Path | None) -> None:
    for each in directories:
        if each is not None:
            shutil.rmtree(each, ignore_errors=True)
