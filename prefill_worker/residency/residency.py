"""The adapters of one worker: which revisions its engine can use, and who asks for what of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterError, AdapterTooLarge, InvalidReference
from adapters.identity import check_revision_id
from adapters.store import AdapterStore, Envelope, RevisionNotStored
from cluster.config.schema import ResidencyConfig
from cluster.control.worker_state import WorkerStateHub
from engine.client import EngineClient
from engine.errors import EngineError
from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.errors import AdapterInUse, DiskCacheFull, HostMemoryFull
from prefill_worker.residency.loading.load_queue import LoadQueue
from prefill_worker.residency.loading.loader import AdapterLoader, Tier
from prefill_worker.residency.loading.receiver import Receiver
from prefill_worker.residency.metrics import ResidencyMetrics, TierFigures
from prefill_worker.residency.threads import WorkThreads
from prefill_worker.residency.tiers.disk_cache import DiskCache
from prefill_worker.residency.tiers.host_memory import HostMemory, HostState, room_bytes
from prefill_worker.residency.tiers.pins import PinOwner
from prefill_worker.residency.tiers.shared_folder import SHARED_MEMORY, SharedFolder

log = logging.getLogger(__name__)

_UNLOAD_TIMEOUT_S = 30.0
_MOST_DELAY_S = 1.0  # of writing behind; once for all that wait, or under load the disk would get one a second
_PIN_TIMEOUT_S = 300.0
_PIN_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Received:
    """A revision that no store has is resident and pinned."""

    load_s: float  # that this took; 0 where it was so already
    was_pinned: bool  # by an earlier call that sent it


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
        self._hub = hub
        self._metrics = metrics
        self._folder = SharedFolder(worker, shared_memory)
        self._threads = WorkThreads(settings.parallel_loads + 2)
        self._host = HostMemory(
            self._folder.path,
            settings.host_bytes,
            self._threads,
            lambda revision_id: engine.unload_adapter(revision_id, _UNLOAD_TIMEOUT_S),
            on_evicted=lambda _: metrics.count_eviction("host"),
            on_out_of_engine=hub.remove_resident,
            on_gone=hub.remove_in_memory_only,
        )
        self._pins = self._host.pins
        self._disk = DiskCache(
            disk_folder,
            settings.disk_bytes,
            self._threads,
            is_pinned=self._pins.__contains__,
            changed=hub.change_on_disk,
            on_evicted=lambda: metrics.count_eviction("disk"),
            on_failed=metrics.count_disk_failure,
        )
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
            self._is_resident,
            self._receiver.ended,
        )
        self._queue = LoadQueue(self._loader, parallel=settings.parallel_loads, queued=settings.queued_loads)
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
            lambda: len(hub.in_memory_only),
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
        await self._host.aclose()
        await self._disk.aclose()
        await self._threads.aclose()
        self._folder.close()

    def engine_gone(self) -> None:
        """The engine ended: nothing is resident, host memory stays as it is."""
        self._loader.engine_gone()
        self._host.engine_gone()

    def engine_up(self) -> None:
        """An engine that holds nothing answers: the pinned adapters go into it."""
        self._pins_due.set()

    # What others ask for.

    async def ensure(
        self,
        revision_id: str,
        tier: Tier,
        deadline_s: float,
        *,
        is_prewarm: bool = False,
        not_in_engine: bool = False,
    ) -> Ensured:
        """Return once the revision is there. `not_in_engine`: the engine has just said that it does not have it.

        Raises AdapterError (retryable ones at the deadline only, but for full queues), EngineError when the engine
        cannot take it, TimeoutError.
        """
        if not_in_engine:
            self._host.not_in_engine(revision_id)
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

    async def put(self, envelope: Envelope, content: AsyncIterator[bytes], deadline_s: float) -> Received:
        """Take in a revision that no store has, and keep it as `pin` does, but never on a disk.

        One that is in host memory is kept without its content. Raises AdapterNotReceived, PinsExceedBudget,
        AdapterTooLarge, HostMemoryFull at the deadline, EngineError, TimeoutError, and as `Acceptance.prepare`; then it
        is as pinned as it was before.
        """
        revision_id = envelope.revision_id
        _check(revision_id)
        loop = asyncio.get_running_loop()
        started_at, was_pinned = loop.time(), self._pins.is_owned(revision_id, PinOwner.PUSH)
        problem: HostMemoryFull | None = None

        def waits(full: HostMemoryFull | None) -> None:
            nonlocal problem
            problem = full

        was_resident = self._host.resident(revision_id) is not None
        with self._pins.pinning(revision_id, room_bytes(envelope.content_bytes), PinOwner.PUSH):
            try:
                async with asyncio.timeout_at(started_at + deadline_s), self._receiver.alone(revision_id, self._queue):
                    entry = await self._host.settled(revision_id)
                    if entry is None:
                        entry = await self._receiver.receive(envelope, content, waits)
                        self._hub.add_in_memory_only(revision_id)
                    await self._loader.into_engine(entry)
            except (AdapterError, EngineError) as error:
                self._metrics.count_load("router", error.code if isinstance(error, AdapterError) else "engine")
                raise
            except TimeoutError:
                if problem is not None:
                    raise problem from None
                raise
        self._metrics.count_load("router", "ok")
        return Received(0.0 if was_resident else loop.time() - started_at, was_pinned)

    async def pin(self, revision_id: str, deadline_s: float, *, memory_only: bool = False) -> None:
        """Make a revision resident, and keep it: over engine restarts, until `unpin`.

        `memory_only`: it came by `put`, and is kept as after that. Raises PinsExceedBudget, and what `ensure` raises;
        then it is as pinned as it was before.
        """
        _check(revision_id)
        owner = PinOwner.PUSH if memory_only else PinOwner.OPERATOR
        if memory_only and self._pins.is_owned(revision_id, owner):
            return
        if memory_only and self._host.get(revision_id) is None:
            raise RevisionNotStored(f"this worker does not have {revision_id} any more; push it again")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        async with asyncio.timeout_at(deadline):
            content_bytes = await self._loader.content_bytes(revision_id)
        with self._pins.pinning(revision_id, room_bytes(content_bytes), owner):
            await self.ensure(revision_id, Tier.HOST, deadline - loop.time())

    def unpin(self, revision_id: str, *, memory_only: bool = False) -> None:
        """Release an operator's pin and a push's, or the push's alone (`memory_only`). Idempotent."""
        owners = (PinOwner.PUSH,) if memory_only else (PinOwner.OPERATOR, PinOwner.PUSH)
        self._pins.release(revision_id, *owners)

    async def evict(self, revision_id: str, from_disk: bool) -> bool:
        """Take a revision out of host memory, and off the disk if asked; False where it was in neither.

        Raises AdapterInUse, and EngineError.
        """
        _check(revision_id)
        if revision_id in self._pins:
            raise AdapterInUse(f"{revision_id} is pinned; unpin it first")
        if revision_id in self._queue:
            raise AdapterInUse(f"{revision_id} is being loaded; try again")
        was_there = await self._host.evict(revision_id)
        if from_disk:
            was_there = await self._disk.remove(revision_id) or was_there
        return was_there

    def _is_there(self, revision_id: str, tier: Tier) -> bool:
        if tier is Tier.HOST:
            return self._host.resident(revision_id) is not None
        return revision_id in self._disk

    def _is_resident(self, revision_id: str) -> None:
        self._hub.add_resident(revision_id)
        if self._settings.disk_bytes and revision_id not in self._disk:
            self._to_disk[revision_id] = None
            self._has_to_disk.set()

    # In the background.

    async def _write_behind(self) -> None:
        """Give the disk what came from the store into host memory."""
        while True:
            await self._has_to_disk.wait()
            with contextlib.suppress(TimeoutError):  # it would take processor time from loads that are waited for
                async with asyncio.timeout(_MOST_DELAY_S):
                    await self._queue.idle()
            while self._to_disk:
                revision_id = next(iter(self._to_disk))
                del self._to_disk[revision_id]
                entry = self._host.get(revision_id)
                if entry is None or entry.state not in (HostState.IN_MEMORY, HostState.RESIDENT):
                    continue  # evicted since
                if entry.is_memory_only:
                    continue
                try:
                    await self._loader.write_to_disk(entry)
                except (AdapterTooLarge, DiskCacheFull) as error:
                    fields = {"revision": revision_id, "error": str(error)}
                    log.warning("not kept on disk", extra={"fields": fields})
                    self._metrics.count_disk_failure()
            self._has_to_disk.clear()

    async def _keep_pins(self) -> None:
        """Load the pinned revisions that the engine does not have, whenever there is a new engine."""
        while True:
            await self._pins_due.wait()
            self._pins_due.clear()
            missing = [revision_id for revision_id in self._pins if not self._host.resident(revision_id)]
            loads = (self.ensure(each, Tier.HOST, _PIN_TIMEOUT_S, is_prewarm=True) for each in missing)
            results = await asyncio.gather(*loads, return_exceptions=True)
            failed = {each: result for each, result in zip(missing, results, strict=True) if _is_failure(result)}
            for each in [each for each, error in failed.items() if isinstance(error, RevisionNotStored)]:
                if self._pins.is_owned(each, PinOwner.PUSH):  # this was the worker's only copy: a retry cannot succeed
                    log.error("an adapter that was in memory only is lost", extra={"fields": {"revision": each}})
                    self.unpin(each)
            if failed and any(each in self._pins for each in failed):
                fields = {"revisions": {each: str(error) for each, error in failed.items()}}
                log.warning("pinned adapters are not resident; they are tried again", extra={"fields": fields})
                await asyncio.sleep(_PIN_RETRY_S)
                self._pins_due.set()


def _check(revision_id: str) -> None:
    try:
        check_revision_id(revision_id)
    except ValueError as error:
        raise InvalidReference(str(error)) from None


def _is_failure(result: object) -> bool:
    if isinstance(result, BaseException) and not isinstance(result, (AdapterError, EngineError, TimeoutError)):
        raise result
    return isinstance(result, BaseException)
