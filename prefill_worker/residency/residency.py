"""Which revisions this worker's engine can use, and how one becomes usable: store or disk -> host memory -> engine."""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterError, AdapterTooLarge, InvalidReference
from adapters.identity import check_revision_id
from adapters.store import AdapterStore, Envelope, RevisionNotStored, StoreCorrupt
from adapters.store.envelope import ENVELOPE_BYTES
from cluster.config import ResidencyConfig
from cluster.worker_metrics import ResidencyMetrics, TierFigures
from cluster.worker_state import WorkerStateHub
from engine.client import EngineClient
from engine.errors import EngineError, EngineRefused, EngineUnreachable
from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.disk_cache import DiskCache
from prefill_worker.residency.errors import AdapterInUse, DiskCacheFull, HostMemoryFull
from prefill_worker.residency.host_memory import HostEntry, HostMemory, HostState
from prefill_worker.residency.load_queue import Load, LoadQueue
from prefill_worker.residency.objects import content_in_memory, is_no_room, write_content
from prefill_worker.residency.shared_folder import SHARED_MEMORY, SharedFolder
from prefill_worker.residency.threads import Stop, WorkThreads

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
_UNLOAD_TIMEOUT_S = 30.0
_PIN_TIMEOUT_S = 300.0
_PIN_RETRY_S = 2.0


class Tier(enum.IntEnum):
    """How close a revision is to be brought."""

    DISK = 1
    HOST = 2


@dataclass(frozen=True, slots=True)
class Ensured:
    """A revision is as close as was asked for."""

    load_s: float  # that this took; 0 where it was so already
    lease_s: float  # for how long it is not evicted from host memory


class Residency:
    """Owner of a worker's adapters on all tiers. Made on the event loop; `open`, `run` and `aclose` it."""

    def __init__(
        self,
        worker: str,
        settings: ResidencyConfig,
        disk_folder: Path,
        open_store: Callable[[], AdapterStore],
        acceptance: Acceptance,
        engine: EngineClient,
        hub: WorkerStateHub,
        metrics: ResidencyMetrics,
        shared_memory: Path = SHARED_MEMORY,
    ) -> None:
        self._settings = settings
        self._store = _OpenedOnce(open_store)
        self._acceptance = acceptance
        self._engine = engine
        self._hub = hub
        self._metrics = metrics
        self._folder = SharedFolder(worker, shared_memory)
        self._threads = WorkThreads(settings.parallel_loads + 2)
        self._queue = LoadQueue(self._load, parallel=settings.parallel_loads, queued=settings.queued_loads)
        self._host = HostMemory(
            self._folder.path,
            settings.host_bytes,
            self._threads,
            lambda revision_id: self._engine.unload_adapter(revision_id, _UNLOAD_TIMEOUT_S),
            on_evicted=lambda _: metrics.count_eviction("host"),
            on_out_of_engine=hub.remove_resident,
        )
        self._disk = DiskCache(
            disk_folder,
            settings.disk_bytes,
            self._threads,
            is_pinned=lambda revision_id: revision_id in self._host.pins,
            changed=hub.change_on_disk,
            on_evicted=lambda: metrics.count_eviction("disk"),
        )
        self._engine_number = 0  # of the engines that this residency has seen
        self._to_disk: dict[str, None] = {}  # revisions to be written behind, in order
        self._has_to_disk = asyncio.Event()
        self._pins_due = asyncio.Event()
        metrics.watch(
            lambda: {
                "host": TierFigures(len(self._host), self._host.used_bytes, self._host.budget_bytes),
                "disk": TierFigures(len(self._disk), self._disk.used_bytes, self._disk.budget_bytes),
            },
            lambda: (self._queue.num_running, self._queue.num_queued, self._queue.num_waiters),
            lambda: len(hub.resident),
            self._host.most_recent,
            lambda: self._queue.keys,
        )

    # Life.

    async def open(self) -> None:
        """Take over the disk cache that an earlier agent has left. Raises OSError."""
        await self._disk.open()
        there = shutil.disk_usage(self._folder.path).total
        if there < self._settings.host_bytes:
            fields = {"host_bytes": self._settings.host_bytes, "shared_memory_bytes": there}
            log.warning(
                "shared memory is smaller than residency.host_bytes: lower it, or give this worker more of %s",
                self._folder.path.parent,
                extra={"fields": fields},
            )

    async def run(self) -> None:
        """Write behind and keep pins, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_behind(), name="adapters to disk")
            group.create_task(self._keep_pins(), name="pinned adapters")

    async def aclose(self) -> None:
        """End all loads and remove what is in host memory; the disk cache stays."""
        await self._queue.aclose()
        await self._disk.aclose()
        self._threads.close()
        self._folder.close()

    def engine_gone(self) -> None:
        """The engine ended: nothing is resident, host memory stays as it is."""
        self._engine_number += 1
        self._host.engine_gone()

    def engine_up(self) -> None:
        """An engine that holds nothing answers: the pinned adapters go into it."""
        self._pins_due.set()

    # What others ask for.

    async def ensure(self, revision_id: str, tier: Tier, deadline_s: float, *, is_prewarm: bool = False) -> Ensured:
        """Return once the revision is there.

        Raises AdapterError (retryable ones at the deadline only, but for full queues), EngineError when the engine
        cannot take it, TimeoutError.
        """
        entry = self._host.resident(revision_id)
        if tier is Tier.HOST and entry is not None:
            self._host.use(entry, self._settings.lease_s)
            self._disk.use(revision_id)
            self._metrics.count_hit()
            return Ensured(0.0, self._settings.lease_s)
        _check(revision_id)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while not self._is_there(revision_id, tier):
            try:
                await self._queue.wait(
                    revision_id, started_at + deadline_s - loop.time(), goal=tier, is_prewarm=is_prewarm
                )
            except AdapterError:
                if tier is Tier.HOST or revision_id not in self._disk:  # else others wanted more than we
                    raise
        if (entry := self._host.resident(revision_id)) is not None:
            self._host.use(entry, self._settings.lease_s)
        return Ensured(loop.time() - started_at, self._settings.lease_s if tier is Tier.HOST else 0.0)

    async def pin(self, revision_id: str, deadline_s: float) -> None:
        """Make a revision resident, and keep it: over engine restarts, until `unpin`.

        Raises PinsExceedBudget, and what `ensure` raises; then it is as pinned as it was before.
        """
        _check(revision_id)
        is_new = revision_id not in self._host.pins
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        async with asyncio.timeout_at(deadline):
            content_bytes = await self._content_bytes(revision_id)
        self._host.pin(revision_id, content_bytes)
        try:
            await self.ensure(revision_id, Tier.HOST, deadline - loop.time())
        except BaseException:
            if is_new:
                self._host.unpin(revision_id)
            raise

    def unpin(self, revision_id: str) -> None:
        """Leave a revision to eviction again. One that is not pinned is fine."""
        self._host.unpin(revision_id)

    async def evict(self, revision_id: str, from_disk: bool) -> bool:
        """Take a revision out of host memory, and off the disk if asked; False where it was in neither.

        Raises AdapterInUse, and EngineError.
        """
        _check(revision_id)
        if revision_id in self._host.pins:
            raise AdapterInUse(f"{revision_id} is pinned; unpin it first")
        if revision_id in self._queue:
            raise AdapterInUse(f"{revision_id} is being loaded; try again")
        was_there = await self._host.evict(revision_id)
        if from_disk:
            was_there = await self._disk.remove(revision_id) or was_there
        return was_there

    # A load.

    def _is_there(self, revision_id: str, tier: Tier) -> bool:
        if tier is Tier.HOST:
            return self._host.resident(revision_id) is not None
        return revision_id in self._disk

    async def _load(self, load: Load) -> None:
        started_at = time.monotonic()
        source = "host"
        try:
            entry = await self._host.settled(load.key)
            if entry is None:
                source = "disk" if load.key in self._disk else "store"
            if load.goal < Tier.HOST:
                await self._into_disk(load.key, entry)
            if load.goal >= Tier.HOST:
                await self._into_engine(await self._into_memory(load))
        except (AdapterError, EngineError) as error:
            code = error.code if isinstance(error, AdapterError) else "engine"
            self._metrics.count_load(source, code)
            fields = {"revision": load.key, "attempt": load.attempts, "error": str(error)}
            log.warning("adapter not loaded", extra={"fields": fields})
            raise
        self._metrics.count_load(source, "ok")
        self._metrics.load_seconds.observe(time.monotonic() - started_at)

    async def _into_memory(self, load: Load) -> HostEntry:
        """The revision's entry in host memory, whole and checked."""
        revision_id = load.key
        if (entry := self._host.get(revision_id)) is not None:
            return entry
        if revision_id in self._disk:
            self._disk.use(revision_id)
            try:
                with self._disk.reading(revision_id) as content:
                    return await self._fill(load, "disk", self._disk.content_bytes(revision_id), lambda: content)
            except (StoreCorrupt, OSError) as error:
                fields = {"revision": revision_id, "error": str(error)}
                log.warning("damaged in the disk cache; it is fetched again", extra={"fields": fields})
                self._metrics.count_load("disk", "damaged")
                await self._disk.drop_damaged(revision_id)
        content_bytes = await self._content_bytes(revision_id)
        return await self._fill(load, "store", content_bytes, lambda: self._store().read(revision_id))

    async def _fill(
        self, load: Load, source: str, content_bytes: int, content: Callable[[], Iterator[bytes | Envelope]]
    ) -> HostEntry:
        revision_id, began = load.key, time.monotonic()
        entry = await self._host.reserve(revision_id, content_bytes, functools.partial(setattr, load, "problem"))
        self._metrics.observe_stage("room", time.monotonic() - began)

        def fill(stop: Stop) -> tuple[Envelope, float, float]:
            at = time.monotonic()
            entry.directory.mkdir()
            envelope = write_content(content(), entry.packed, content_bytes, stop, as_object=False)
            copied_at = time.monotonic()
            self._acceptance.prepare(revision_id, entry.packed)
            return envelope, copied_at - at, time.monotonic() - copied_at

        try:
            entry.envelope, copy_s, check_s = await self._threads.run(fill)
        except BaseException as error:
            await self._host.discard(entry)
            if isinstance(error, OSError) and is_no_room(error):
                await self._host.shrink()  # for the next attempt
                raise HostMemoryFull(
                    f"{self._folder.path.parent} has no room for {revision_id} ({error.strerror}) although "
                    "residency.host_bytes has: lower it, or give this worker more shared memory"
                ) from error
            raise
        self._metrics.observe_stage("fetch" if source == "store" else "copy", copy_s)
        self._metrics.observe_stage("check", check_s)
        self._host.settle(entry, HostState.IN_MEMORY)
        return entry

    async def _into_engine(self, entry: HostEntry) -> None:
        if entry.state is HostState.RESIDENT:
            return
        engine_number, began = self._engine_number, time.monotonic()
        with self._host.held(entry):
            entry.may_be_in_engine = True
            try:
                await self._engine.load_adapter(entry.revision_id, entry.directory, _LOAD_TIMEOUT_S)
            except EngineRefused:
                await self._host.discard(entry)
                raise
            if engine_number != self._engine_number:
                raise EngineUnreachable("the engine ended while the adapter was being loaded")
            self._host.settle(entry, HostState.RESIDENT)
            self._host.use(entry, self._settings.lease_s)
        self._metrics.observe_stage("engine", time.monotonic() - began)
        self._hub.add_resident(entry.revision_id)
        if entry.revision_id not in self._disk and self._settings.disk_bytes:
            self._to_disk[entry.revision_id] = None
            self._has_to_disk.set()

    async def _into_disk(self, revision_id: str, entry: HostEntry | None) -> None:
        if revision_id in self._disk:
            return
        if entry is not None:
            await self._write_to_disk(entry)
        else:
            content_bytes = await self._content_bytes(revision_id)
            began = time.monotonic()
            await self._disk.write(revision_id, content_bytes, lambda: self._store().read(revision_id))
            self._metrics.observe_stage("fetch", time.monotonic() - began)

    async def _content_bytes(self, revision_id: str) -> int:
        """Of its packed file. Raises RevisionNotStored and StoreUnavailable."""
        entry = self._host.get(revision_id)
        if entry is not None and entry.envelope is not None:
            return entry.envelope.content_bytes
        if revision_id in self._disk:
            return self._disk.content_bytes(revision_id)
        store = self._store
        found = await self._threads.run(lambda _: store().find(revision_id))
        if found is None:
            raise RevisionNotStored(f"the adapter store has no {revision_id}; import the adapter again")
        return max(found.num_bytes - ENVELOPE_BYTES, 0)

    # In the background.

    async def _write_behind(self) -> None:
        """Give the disk what came from the store into host memory."""
        while True:
            await self._has_to_disk.wait()
            while self._to_disk:
                revision_id = next(iter(self._to_disk))
                del self._to_disk[revision_id]
                entry = self._host.get(revision_id)
                if entry is None or entry.state not in (HostState.IN_MEMORY, HostState.RESIDENT):
                    continue  # evicted since
                try:
                    await self._write_to_disk(entry)
                except (AdapterTooLarge, DiskCacheFull) as error:
                    fields = {"revision": revision_id, "error": str(error)}
                    log.warning("not kept on disk", extra={"fields": fields})
                    self._metrics.count_disk_failure()
            self._has_to_disk.clear()

    async def _write_to_disk(self, entry: HostEntry) -> None:
        envelope = entry.envelope
        assert envelope is not None
        with self._host.held(entry):
            began = time.monotonic()
            await self._disk.write(
                entry.revision_id, envelope.content_bytes, lambda: content_in_memory(entry.packed, envelope)
            )
            self._metrics.observe_stage("disk_write", time.monotonic() - began)

    async def _keep_pins(self) -> None:
        """Load the pinned revisions that the engine does not have, whenever there is a new engine."""
        while True:
            await self._pins_due.wait()
            self._pins_due.clear()
            missing = [revision_id for revision_id in self._host.pins if not self._host.resident(revision_id)]
            loads = (self.ensure(each, Tier.HOST, _PIN_TIMEOUT_S, is_prewarm=True) for each in missing)
            results = await asyncio.gather(*loads, return_exceptions=True)
            failed = {each: result for each, result in zip(missing, results, strict=True) if _is_failure(result)}
            if failed and any(each in self._host.pins for each in failed):
                fields = {"revisions": {each: str(error) for each, error in failed.items()}}
                log.warning("pinned adapters are not resident; they are tried again", extra={"fields": fields})
                await asyncio.sleep(_PIN_RETRY_S)
                self._pins_due.set()


class _OpenedOnce:
    """A store that is opened by the first who needs it, and again if that failed. For threads."""

    def __init__(self, open_store: Callable[[], AdapterStore]) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        self._store: AdapterStore | None = None

    def __call__(self) -> AdapterStore:
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store


def _check(revision_id: str) -> None:
    try:
        check_revision_id(revision_id)
    except ValueError as error:
        raise InvalidReference(str(error)) from None


def _is_failure(result: object) -> bool:
    if isinstance(result, BaseException) and not isinstance(result, (AdapterError, EngineError, TimeoutError)):
        raise result
    return isinstance(result, BaseException)
