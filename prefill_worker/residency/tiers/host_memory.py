"""Adapters in host memory: one folder per adapter in shared memory, which every rank of the engine maps.

    absent -> LOADING -> IN_MEMORY -> RESIDENT -> EVICTING -> absent
                             ^            |          |
                             |            +<---------+   the engine still uses it
                             +-- the engine ended, or may hold it or not

The bytes of all folders never exceed the budget: room is reserved before anything is written. Who is evicted is the
one that was used least recently, of those that are not pinned, leased or held.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterTooLarge
from adapters.identity import folder_of
from adapters.packed import PACKED_NAME
from adapters.store import Envelope
from engine.client import IN_USE
from engine.errors import EngineError
from prefill_worker.residency.errors import AdapterInUse, HostMemoryFull
from prefill_worker.residency.threads import WorkThreads, ended
from prefill_worker.residency.tiers.evict_ahead import EvictAhead
from prefill_worker.residency.tiers.pins import Pins

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_RETRY_S = (0.02, 0.5)  # between rounds over victims that the engine uses: it does not tell when it is done with one
_MOST_REFUSALS = 8  # of the engine in one round
_MOST_AT_ONCE = 8  # evictions side by side
_RETRY_AFTER_S = 1.0


class HostState(enum.Enum):
    """What a folder in host memory is."""

    LOADING = "loading"  # room is reserved, it is being filled
    IN_MEMORY = "in memory"  # whole, but not known to be loaded by the engine
    RESIDENT = "resident"  # the engine can use it
    EVICTING = "evicting"


@dataclass(eq=False, slots=True)
class HostEntry:
    """One adapter in host memory."""

    revision_id: str
    directory: Path
    num_bytes: int  # reserved, in whole pages
    state: HostState = HostState.LOADING
    envelope: Envelope | None = None  # once it is whole
    lease_until_s: float = 0.0  # by the event loop's clock
    num_holds: int = 0
    may_be_in_engine: bool = False
    is_memory_only: bool = False  # sent by a router and in no store: never to be written to the disk

    @property
    def packed(self) -> Path:
        return self.directory / PACKED_NAME


class HostMemory:
    """Owner of the folders. `unload` takes a revision out of the engine; it raises EngineError where it cannot."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        threads: WorkThreads,
        unload: Callable[[str], Awaitable[None]],
        on_evicted: Callable[[str], None],
        on_out_of_engine: Callable[[str], None],
        on_gone: Callable[[str], None],
    ) -> None:
        """`on_gone` is told of all that leaves memory, `on_evicted` of what made room or was told to go."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.pins = Pins(budget_bytes, on_unpinned=self._tell)
        self._root = root
        self._threads = threads
        self._unload = unload
        self._on_evicted = on_evicted
        self._on_out_of_engine = on_out_of_engine
        self._on_gone = on_gone
        self._entries: OrderedDict[str, HostEntry] = OrderedDict()  # the least recently used first
        self._folders = itertools.count(1)
        self._evictor = asyncio.Lock()
        self._wanted_bytes = 0  # of reservations that wait for room
        self._evicting_bytes = 0
        self._ahead = EvictAhead()
        self._ahead_bytes = 0  # to be evicted ahead; 0 until something is short
        self._evicts_ahead: asyncio.Task[None] | None = None
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

    def most_recent(self, count: int) -> list[str]:
        """The resident revisions that were used last, at most `count`, the latest first."""
        latest = (e.revision_id for e in reversed(self._entries.values()) if e.state is HostState.RESIDENT)
        return list(itertools.islice(latest, count))

    def use(self, entry: HostEntry, lease_s: float) -> None:
        """Make it the last to be evicted, and not within `lease_s`."""
        self._entries.move_to_end(entry.revision_id)
        entry.lease_until_s = max(entry.lease_until_s, asyncio.get_running_loop().time() + lease_s)

    @contextmanager
    def held(self, entry: HostEntry) -> Iterator[None]:
        """Inside, it is not evicted."""
        entry.num_holds += 1
        try:
            yield
        finally:
            entry.num_holds -= 1
            self._tell()

    def settle(self, entry: HostEntry, state: HostState) -> None:
        """A load has come this far."""
        entry.state = state
        self._tell()

    async def settled(self, revision_id: str) -> HostEntry | None:
        """The entry, once no eviction of it is under way."""
        while (entry := self._entries.get(revision_id)) is not None and entry.state is HostState.EVICTING:
            await self._change()
        return entry

    async def reserve(
        self, revision_id: str, content_bytes: int, waits: Callable[[HostMemoryFull | None], None]
    ) -> HostEntry:
        """A new entry with room for a packed file of so many bytes, however many evictions and seconds it takes.

        `waits` is told what is waited for, and with None that it no longer is. Raises AdapterTooLarge where it cannot
        ever fit.
        """
        num_bytes = room_bytes(content_bytes)
        if num_bytes > self.budget_bytes:
            raise AdapterTooLarge(
                f"{revision_id} takes {num_bytes} bytes of host memory, more than this worker's "
                f"residency.host_bytes of {self.budget_bytes}; raise it"
            )
        if self._evictor.locked():
            waits(self._full(revision_id, num_bytes))
        is_short = self._ahead.take(revision_id, num_bytes, -self._short_bytes())
        self._wanted_bytes += num_bytes
        if is_short:
            self._evict_ahead(num_bytes)
        try:
            async with self._evictor:  # one at a time, in order of arrival: a large one is not starved by small ones
                pause_s = _RETRY_S[0]
                while self.used_bytes + num_bytes > self.budget_bytes:
                    if await self._make_room():
                        pause_s = _RETRY_S[0]
                        continue
                    waits(self._full(revision_id, num_bytes))
                    await self._change(within_s=pause_s)
                    pause_s = min(2 * pause_s, _RETRY_S[1])
                waits(None)
                directory = self._root / f"{folder_of(revision_id)}.{next(self._folders)}"
                entry = HostEntry(revision_id, directory, num_bytes)
                self._entries[revision_id] = entry
                self.used_bytes += num_bytes
        finally:
            self._wanted_bytes -= num_bytes
            self._ahead.limit(-self._short_bytes())
        return entry

    async def discard(self, entry: HostEntry) -> None:
        """Take out an entry that did not become whole, or that the engine has refused."""
        try:
            await self._threads.run_to_end(lambda: _remove(entry.directory))
        finally:
            self._forget(entry)

    async def aclose(self) -> None:
        """End what goes on by itself."""
        self._is_closed = True
        if self._evicts_ahead is not None:
            self._evicts_ahead.cancel()
            await asyncio.wait([self._evicts_ahead])

    async def shrink(self) -> None:
        """Evict one adapter, if any may go: there is less memory than the budget says."""
        async with self._evictor:
            await self._evict_some(1)

    def engine_gone(self) -> None:
        """The engine ended, with all that it had loaded."""
        for entry in self._entries.values():
            entry.may_be_in_engine = False
            if entry.state is HostState.RESIDENT:
                entry.state = HostState.IN_MEMORY
        self._tell()

    def not_in_engine(self, revision_id: str) -> None:
        """The engine has said that it does not have a revision, whatever it was told to load."""
        if (entry := self.resident(revision_id)) is not None:
            entry.state = HostState.IN_MEMORY
            self._on_out_of_engine(revision_id)
            self._tell()

    async def evict(self, revision_id: str) -> bool:
        """Take out an adapter; False where there is none. Raises AdapterInUse, and EngineError."""
        while (entry := await self.settled(revision_id)) is not None and entry.num_holds:
            await self._change()  # it is being copied to the disk
        if entry is None:
            return False
        if reason := self._why_kept(entry):
            raise AdapterInUse(f"{revision_id} is {reason}; it cannot be evicted now")
        [went] = await _results([self._evict(entry)])
        if not went:
            raise AdapterInUse(f"{revision_id} is in use by requests; try again when they have ended")
        return True

    async def _make_room(self) -> bool:
        """Evict for all who wait for room; whether there may be more of it now."""
        if (short_bytes := self._short_bytes()) > 0:
            return await self._evict_some(short_bytes)
        await self._change()  # of what is being evicted already, ahead of need or because somebody said so
        return True

    def _short_bytes(self) -> int:
        """What those who wait for room lack, once all that is being evicted is gone; negative where some is left."""
        return self.used_bytes - self._evicting_bytes + self._wanted_bytes - self.budget_bytes

    def _evict_ahead(self, num_bytes: int) -> None:
        """Have some room free for those who come next, after one of so many bytes was short of it.

        An engine unloads only between two batches, and they would wait for that before their own loads wait for it.
        """
        self._ahead_bytes = self._ahead.goal_bytes(num_bytes, self.budget_bytes - self.pins.num_bytes)
        if not self._is_closed and (self._evicts_ahead is None or self._evicts_ahead.done()):
            self._evicts_ahead = asyncio.create_task(self._evict_what_is_due(), name="evict ahead")
            self._evicts_ahead.add_done_callback(_report)

    async def _evict_what_is_due(self) -> None:
        while self._ahead_bytes:
            ahead_bytes, self._ahead_bytes = self._ahead_bytes, 0
            await self._evict_some(self._short_bytes(), ahead_bytes)

    async def _evict_some(self, num_bytes: int, ahead_bytes: int = 0) -> bool:
        """Evict adapters of about so many bytes, and of `ahead_bytes` more, that the engine lets go; whether any."""
        refused: set[HostEntry] = set()
        while len(refused) < _MOST_REFUSALS and (victims := self._victims(num_bytes, ahead_bytes, refused)):
            if any(await _results([self._evict(entry, is_ahead) for entry, is_ahead in victims.items()])):
                return True
            refused.update(victims)
        return False

    def _victims(self, num_bytes: int, ahead_bytes: int, refused: set[HostEntry]) -> dict[HostEntry, bool]:
        """The least recently used that may go, a few at once, and whether each would go ahead of need."""
        victims: dict[HostEntry, bool] = {}
        lacking_bytes = num_bytes + ahead_bytes
        for entry in self._entries.values():
            if lacking_bytes <= 0 or len(victims) == _MOST_AT_ONCE:
                break
            if entry in refused or self._why_kept(entry):
                continue
            is_ahead = lacking_bytes <= ahead_bytes
            if is_ahead and entry.num_bytes > lacking_bytes:
                break  # a large one does not go for what small ones may need
            victims[entry] = is_ahead
            lacking_bytes -= entry.num_bytes
        return victims

    def _why_kept(self, entry: HostEntry) -> str:
        """What keeps an entry from eviction; empty for nothing that is known here."""
        if entry.state in (HostState.LOADING, HostState.EVICTING):
            return f"being {'loaded' if entry.state is HostState.LOADING else 'evicted'}"
        if entry.revision_id in self.pins:
            return "pinned"
        if entry.num_holds:
            return "being copied or loaded"
        if asyncio.get_running_loop().time() < entry.lease_until_s:
            return "leased to a request"
        return ""

    def _evict(self, entry: HostEntry, is_ahead: bool = False) -> asyncio.Task[bool]:
        """Out of the engine, then out of memory. False where the engine keeps it."""
        before, entry.state = entry.state, HostState.EVICTING
        self._evicting_bytes += entry.num_bytes
        return asyncio.create_task(self._evict_now(entry, before, is_ahead), name=f"evict {entry.revision_id}")

    async def _evict_now(self, entry: HostEntry, before: HostState, is_ahead: bool) -> bool:
        # No await between where it is gone, or here again, and where that is counted.
        try:
            went = await self._out_of_engine_and_memory(entry, before)
        finally:
            self._evicting_bytes -= entry.num_bytes
        if went and is_ahead:
            self._ahead.add(entry.revision_id, entry.num_bytes)
        self._ahead.limit(-self._short_bytes())
        return went

    async def _out_of_engine_and_memory(self, entry: HostEntry, before: HostState) -> bool:
        # The engine loads what it has once known again by itself, from the folder that it knows, if a request comes.
        hidden = entry.directory.with_name(f"{entry.directory.name}.evicting")
        try:
            with suppress(FileNotFoundError):  # somebody has removed it: the engine cannot load it again either
                entry.directory.rename(hidden)
            if entry.may_be_in_engine:
                await self._unload(entry.revision_id)
        except Exception as error:
            log.debug("not evicted", extra={"fields": {"revision": entry.revision_id, "reason": str(error)}})
            with suppress(FileNotFoundError):
                hidden.rename(entry.directory)
            # An engine that ended meanwhile has made it another one's; one that does not answer may have unloaded it.
            still_there = before is HostState.RESIDENT and entry.may_be_in_engine and IN_USE in str(error)
            if before is HostState.RESIDENT and not still_there:
                self._on_out_of_engine(entry.revision_id)
            entry.state = HostState.RESIDENT if still_there else HostState.IN_MEMORY
            self._entries.move_to_end(entry.revision_id)  # it is being used
            self._tell()
            if not isinstance(error, EngineError):
                raise
            return False
        if before is HostState.RESIDENT:
            self._on_out_of_engine(entry.revision_id)
        entry.directory = hidden
        await self.discard(entry)
        self._on_evicted(entry.revision_id)
        return True

    def _forget(self, entry: HostEntry) -> None:
        if self._entries.get(entry.revision_id) is entry:
            del self._entries[entry.revision_id]
            self.used_bytes -= entry.num_bytes
            self._on_gone(entry.revision_id)
        self._tell()

    def _full(self, revision_id: str, num_bytes: int) -> HostMemoryFull:
        return HostMemoryFull(
            f"host memory has no room for the {num_bytes} bytes of {revision_id}: all {len(self._entries)} adapters in "
            f"its {self.budget_bytes} bytes (residency.host_bytes) are in use, leased or pinned; try again",
            _RETRY_AFTER_S,
        )

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self, within_s: float | None = None) -> None:
        """Wait for any change, no longer than `within_s` seconds."""
        changed = self._changed
        try:
            async with asyncio.timeout(within_s):
                await changed.wait()
        except TimeoutError:
            pass


def room_bytes(content_bytes: int) -> int:
    """What a packed file of so many bytes takes of host memory, with its folder's adapter_config.json."""
    return -(-content_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES


async def _results(evictions: Sequence[asyncio.Task[bool]]) -> list[bool]:
    """Of all of them, once all have ended, which the engine's deadline bounds: half an eviction would be neither."""
    try:
        await asyncio.wait(evictions)
    except asyncio.CancelledError:
        for each in evictions:
            await ended(each)
        raise
    return await asyncio.gather(*evictions)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("eviction ahead of need failed", exc_info=error)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
