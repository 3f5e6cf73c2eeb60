"""The residency of one worker: makes revisions resident, pins, pushes and evicts them, and fills the disk cache."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from adapters.errors import AdapterError, AdapterTooLarge
from adapters.files.locked_folder import SHARED_MEMORY, LockedFolder
from adapters.identity import check_revision_id, revision_of, split_scaled_id
from adapters.store import AdapterStore, Envelope, RevisionNotStored
from cluster.config.schema import ResidencyConfig
from cluster.control.worker_state import WorkerStateHub
from engine.client import EngineClient
from engine.errors import EngineError
from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.errors import AdapterInUse, DiskCacheFull, HostMemoryFull
from prefill_worker.residency.loading.load_queue import LoadQueue
from prefill_worker.residency.loading.loader import AdapterLoader
from prefill_worker.residency.loading.receiver import Receiver
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import WorkThreads
from prefill_worker.residency.tiers.disk_cache import DiskCache
from prefill_worker.residency.tiers.host_entry import HostState
from prefill_worker.residency.tiers.host_memory import HostMemory, room_bytes
from process.tracing.span import NO_SPAN, Span

log = logging.getLogger(__name__)

FOLDERS = "prelude-adapters-"  # in shared memory, which other programs use too
_MAX_WRITE_DELAY_S = 1.0  # of the write-behind while loads run; for all queued adapters together
_PIN_TIMEOUT_S = 300.0
_PIN_RETRY_S = 2.0
_LATE_LEASES = 10  # leases that a request gets which has come too late once: its router retries a few times only


class Residency:
    """Owns a worker's adapters on all tiers. Create it on the event loop, then `open`, `run` and `aclose` it."""

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
        *,
        reuses_folders: bool = True,
    ) -> None:
        """`reuses_folders`: see `HostMemory`."""
        self._settings = settings
        self._hub = hub
        self._metrics = metrics
        self._folder = LockedFolder(FOLDERS, worker, shared_memory)  # the next agent removes it if this one is killed
        self._threads = WorkThreads(settings.parallel_loads + 2)
        self._host = HostMemory(
            self._folder.path,
            settings.host_bytes,
            self._threads,
            engine,
            hub,
            metrics,
            reuses_folders=reuses_folders,
        )
        self._pins = self._host.pins
        self._disk = DiskCache(disk_folder, settings.disk_bytes, self._threads, hub, metrics)
        self._receiver = Receiver(acceptance, self._host, self._threads, metrics)
        self._loader = AdapterLoader(
            open_store,
            acceptance,
            self._host,
            self._disk,
            engine,
            self._threads,
            metrics,
            settings.lease_s,
            self._on_resident,
            self._receiver.wait_until_ended,
        )
        self._queue = LoadQueue(self._loader, parallel=settings.parallel_loads, queued=settings.queued_loads)
        self._to_disk: dict[str, None] = {}  # revisions for the write-behind, in order
        self._has_to_disk = asyncio.Event()
        self._pins_due = asyncio.Event()
        tiers: dict[str, HostMemory | DiskCache] = {"host": self._host, "disk": self._disk}
        for name, tier in tiers.items():
            metrics.watch("adapter_tier_adapters", tier.__len__, name)
            metrics.watch("adapter_tier_bytes", partial(getattr, tier, "used_bytes"), name)
            metrics.watch("adapter_tier_budget_bytes", partial(getattr, tier, "budget_bytes"), name)
        metrics.watch("resident_adapters", lambda: len(hub.resident))
        metrics.watch("memory_only_adapters", lambda: len(hub.in_memory_only))
        metrics.watch("adapter_loads_running", lambda: self._queue.num_running)
        metrics.watch("adapter_loads_queued", lambda: self._queue.num_queued)
        metrics.watch("adapter_load_waiters", lambda: self._queue.num_waiters)

    # Lifecycle.

    async def open(self) -> None:
        """Take over the disk cache of an earlier agent. Raises OSError."""
        await self._disk.open()
        shared_memory_bytes = shutil.disk_usage(self._folder.path).total
        if shared_memory_bytes < self._settings.host_bytes:
            fields = {"host_bytes": self._settings.host_bytes, "shared_memory_bytes": shared_memory_bytes}
            log.warning(
                "shared memory is smaller than residency.host_bytes: lower it, or give this worker more of %s",
                self._folder.path.parent,
                extra={"fields": fields},
            )

    async def run(self) -> None:
        """Write adapters behind to the disk and reload pinned ones after engine restarts, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_behind(), name="adapters to disk")
            group.create_task(self._keep_pins(), name="pinned adapters")

    async def aclose(self) -> None:
        """Cancel all loads and empty host memory. The disk cache stays."""
        await self._queue.aclose()
        await self._host.aclose()
        await self._threads.aclose()
        self._folder.close()

    def engine_gone(self) -> None:
        """The engine ended: nothing is resident any more. Host memory keeps its adapters."""
        self._loader.engine_gone()
        self._host.engine_gone()

    def engine_up(self) -> None:
        """A new engine is up: load the pinned adapters into it."""
        self._pins_due.set()

    # Calls from routers and operators.

    async def ensure(
        self,
        revision_id: str,
        deadline_s: float,
        *,
        is_prewarm: bool = False,
        not_in_engine: bool = False,
        tenant: str = "",
        span: Span = NO_SPAN,
    ) -> float:
        """Make a revision resident and lease it. Returns the seconds that loading took, 0 if it was resident.

        `revision_id`: also at a scale (`adapters.identity.scaled_id`), which is an adapter of its own in all but the
        store and the disk cache.
        `not_in_engine`: the engine has just reported that it does not hold it; the request gets a longer lease.
        `tenant`: who waits for it; loads that wait start in turns of tenants.

        A load is a step of `span`, the first waiter's; the others' are linked to it.

        Raises AdapterError (LoadQueueFull at once, other retryable ones at the deadline), EngineError, TimeoutError.
        """
        lease_s = self._settings.lease_s
        if not_in_engine:
            self._host.mark_unloaded(revision_id)
            lease_s *= _LATE_LEASES
        entry = self._host.resident(revision_id)
        if entry is not None:
            self._host.use(entry, lease_s)
            self._disk.use(revision_of(revision_id))
            self._metrics.count_hit()
            return 0.0
        split_scaled_id(revision_id)
        started_at = time.monotonic()  # uvloop's clock counts milliseconds, and a load can take less
        while (entry := self._host.resident(revision_id)) is None:
            remaining_s = started_at + deadline_s - time.monotonic()
            await self._queue.wait(revision_id, remaining_s, is_prewarm=is_prewarm, tenant=tenant, span=span)
        self._host.use(entry, lease_s)
        return time.monotonic() - started_at

    async def put(self, envelope: Envelope, content: AsyncIterator[bytes], deadline_s: float, path: str = "") -> bool:
        """Receive a pushed revision that no store has, load it and pin it. True if an earlier push had pinned it.

        `path`: of the file where the router is, which may be this host. It is never written to a disk, and not read if
        the revision is in host memory. Raises AdapterNotReceived, PinsExceedBudget, AdapterTooLarge, HostMemoryFull at
        the deadline, EngineError, TimeoutError, and as `Acceptance.prepare`; pins are then unchanged.
        """
        revision_id = envelope.revision_id
        check_revision_id(revision_id)
        was_pinned = self._pins.is_kept(revision_id)
        pending_error: HostMemoryFull | None = None

        def on_blocked(full: HostMemoryFull | None) -> None:
            nonlocal pending_error
            pending_error = full

        with self._pins.pinning(revision_id, room_bytes(envelope.content_bytes)):
            try:
                async with (
                    asyncio.timeout(deadline_s),
                    self._receiver.exclusive(revision_id, self._queue),
                ):
                    entry = await self._host.settled(revision_id)
                    if entry is None:
                        entry = await self._receiver.receive(envelope, content, on_blocked, path)
                        self._hub.add_in_memory_only(revision_id)
                    await self._loader.into_engine(entry)
                    # Also one that came from a store: routers release the pins of what is reported.
                    self._hub.add_in_memory_only(revision_id)
            except (AdapterError, EngineError) as error:
                self._metrics.count_load("router", error.code if isinstance(error, AdapterError) else "engine")
                raise
            except TimeoutError:
                if pending_error is not None:
                    raise pending_error from None
                raise
        self._hub.add_kept(revision_id)
        self._metrics.count_load("router", "ok")
        return was_pinned

    async def pin(self, revision_id: str, deadline_s: float) -> None:
        """Renew the pin of a push: the revision is resident, also in later engines, until `unpin`.

        Raises RevisionNotStored if it is not in host memory, PinsExceedBudget, and as `ensure`.
        """
        if self._pins.is_kept(revision_id):
            return
        if (entry := self._host.get(revision_id)) is None:
            raise RevisionNotStored(f"this worker does not have {revision_id} any more; push it again")
        with self._pins.pinning(revision_id, entry.num_bytes):
            await self.ensure(revision_id, deadline_s)
        self._hub.add_kept(revision_id)

    def unpin(self, revision_id: str) -> None:
        """Release the pin of a push. Idempotent."""
        self._pins.release(revision_id)
        self._hub.remove_kept(revision_id)

    async def evict(self, revision_id: str, from_disk: bool) -> bool:
        """Remove a revision, at all scales, from host memory and, with `from_disk`, from the disk cache.

        Returns False if it was in neither.

        Raises AdapterInUse and EngineError.
        """
        check_revision_id(revision_id)
        if revision_id in self._pins:
            raise AdapterInUse(f"{revision_id} is pinned: it is in memory only, and an alias points to it")
        was_evicted = False
        for each in {revision_id, *(entry.revision_id for entry in self._host)}:
            if revision_of(each) == revision_id:
                if each in self._queue:
                    raise AdapterInUse(f"{each} is being loaded; try again")
                was_evicted = await self._host.evict(each) or was_evicted
        if from_disk:
            was_evicted = await self._disk.remove(revision_id) or was_evicted
        return was_evicted

    def _on_resident(self, revision_id: str) -> None:
        self._hub.add_resident(revision_id)
        is_scaled = revision_of(revision_id) != revision_id
        if not is_scaled and self._settings.disk_bytes and revision_id not in self._disk:
            self._to_disk[revision_id] = None
            self._has_to_disk.set()

    # In the background.

    async def _write_behind(self) -> None:
        """Copy adapters that were loaded from the store to the disk cache."""
        while True:
            await self._has_to_disk.wait()
            with contextlib.suppress(TimeoutError):  # writes take processor time from loads
                async with asyncio.timeout(_MAX_WRITE_DELAY_S):
                    await self._queue.wait_until_idle()
            while self._to_disk:
                revision_id = next(iter(self._to_disk))
                del self._to_disk[revision_id]
                entry = self._host.get(revision_id)
                if entry is None or entry.state not in (HostState.IN_MEMORY, HostState.RESIDENT):
                    continue  # evicted meanwhile
                if entry.is_memory_only:
                    continue
                try:
                    await self._loader.write_to_disk(entry)
                except (AdapterTooLarge, DiskCacheFull) as error:
                    fields = {"revision": revision_id, "error": str(error)}
                    log.warning("disk cache write failed", extra={"fields": fields})
                    self._metrics.count_disk_failure()
            self._has_to_disk.clear()

    async def _keep_pins(self) -> None:
        """Load the pinned revisions into each new engine."""
        while True:
            await self._pins_due.wait()
            self._pins_due.clear()
            missing = [each for each in self._pins if not self._host.resident(each)]
            loads = (self.ensure(each, _PIN_TIMEOUT_S, is_prewarm=True) for each in missing)
            results = await asyncio.gather(*loads, return_exceptions=True)
            failed = {each: result for each, result in zip(missing, results, strict=True) if _is_failure(result)}
            for each in [each for each, error in failed.items() if isinstance(error, RevisionNotStored)]:
                if self._pins.is_kept(each):  # this was the worker's only copy: a retry cannot succeed
                    log.error("memory-only adapter lost", extra={"fields": {"revision": each}})
                    self.unpin(each)
            if failed and any(each in self._pins for each in failed):
                fields = {"revisions": {each: str(error) for each, error in failed.items()}}
                log.warning("pinned adapters not resident; retrying", extra={"fields": fields})
                await asyncio.sleep(_PIN_RETRY_S)
                self._pins_due.set()


def _is_failure(result: object) -> bool:
    if isinstance(result, BaseException) and not isinstance(result, (AdapterError, EngineError, TimeoutError)):
        raise result
    return isinstance(result, BaseException)
