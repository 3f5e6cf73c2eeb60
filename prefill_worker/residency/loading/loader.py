"""Loads one adapter: store or disk -> host memory -> engine."""

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from adapters.errors import AdapterError, AdapterUnsupported
from adapters.identity import revision_of, split_scaled_id
from adapters.packed import scale_packed
from adapters.store import AdapterNotTrusted, AdapterStore, Envelope, RevisionNotStored, StoreCorrupt
from adapters.store.envelope import ENVELOPE_BYTES, Part
from engine.client import EngineClient
from engine.errors import AdapterNotTaken, EngineError, EngineUnreachable
from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.errors import AdapterRefusedByEngine
from prefill_worker.residency.loading.turns import Load
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import Stop, WorkThreads
from prefill_worker.residency.tiers.disk_cache import DiskCache
from prefill_worker.residency.tiers.host_entry import HostEntry, HostState
from prefill_worker.residency.tiers.host_memory import HostMemory
from prefill_worker.residency.tiers.objects import content_in_memory, write_content
from process.tracing.span import NO_SPAN, Span

log = logging.getLogger(__name__)

_ENGINE_TIMEOUT_S = 120.0
_MAX_REFUSALS = 1000  # remembered


class AdapterLoader:
    """The load function of the load queue."""

    def __init__(
        self,
        open_store: Callable[[], AdapterStore],
        acceptance: Acceptance,
        host: HostMemory,
        disk: DiskCache,
        engine: EngineClient,
        threads: WorkThreads,
        metrics: ResidencyMetrics,
        lease_s: float,
        on_resident: Callable[[str], None],
        wait_for_push: Callable[[str], Awaitable[None]],
    ) -> None:
        """`wait_for_push` returns when no router is pushing the revision."""
        self._store = functools.cache(open_store)  # opened at the first use, and again if that failed
        self._acceptance = acceptance
        self._host = host
        self._disk = disk
        self._engine = engine
        self._threads = threads
        self._metrics = metrics
        self._lease_s = lease_s
        self._on_resident = on_resident
        self._wait_for_push = wait_for_push
        self._engine_number = 0  # counts engine restarts
        # Revision -> why this worker cannot serve it. A revision is immutable, and reading it again could evict
        # gigabytes of others.
        self._refusals: OrderedDict[str, str] = OrderedDict()

    def engine_gone(self) -> None:
        """The engine ended: loads into it in progress fail."""
        self._engine_number += 1

    async def __call__(self, load: Load) -> None:
        with load.span.child("load adapter", {"prelude.attempt": load.attempts}) as span:
            await self._load(load, span)

    async def _load(self, load: Load, span: Span) -> None:
        started_at = time.monotonic()
        source = "host"
        try:
            await self._wait_for_push(load.key)
            entry = await self._host.settled(load.key)
            if entry is None:
                source = "disk" if revision_of(load.key) in self._disk else "store"
            span.set({"prelude.source": source})
            if load.key in self._refusals:
                raise AdapterUnsupported(self._refusals[load.key])
            await self.into_engine(entry or await self._into_memory(load, span), span)
        except (AdapterError, EngineError) as error:
            code = error.code if isinstance(error, AdapterError) else "engine"
            self._metrics.count_load(source, code)
            fields = {"revision": load.key, "attempt": load.attempts, "error": str(error)}
            log.warning("adapter load failed", extra={"fields": fields})
            raise
        self._metrics.count_load(source, "ok")
        self._metrics.load_seconds.observe(time.monotonic() - started_at)

    async def _into_memory(self, load: Load, span: Span) -> HostEntry:
        """Create the revision's entry in host memory, complete and verified."""
        revision_id = revision_of(load.key)
        if revision_id in self._disk:
            self._disk.use(revision_id)
            try:
                with self._disk.reading(revision_id) as content:
                    return await self._fill(load, "disk", self._disk.content_bytes(revision_id), content, span)
            except (StoreCorrupt, AdapterNotTrusted) as error:  # raised by reads, and of what they gave
                fields = {"revision": revision_id, "error": str(error)}
                log.warning("disk cache file damaged; fetching again", extra={"fields": fields})
                self._metrics.count_load("disk", "damaged")
                await self._disk.drop_damaged(revision_id)
        try:
            return await self._from_store(load, span)
        except RevisionNotStored:  # its message contains the store's address
            raise _not_stored(revision_id) from None

    async def _from_store(self, load: Load, span: Span) -> HostEntry:
        began = time.monotonic()
        claimed, rest = await self._threads.run(lambda _: self._store().begin_read(revision_of(load.key)))
        try:
            if claimed.content_bytes > self._host.budget_bytes:
                await self._check_size(claimed)
            begin_s = time.monotonic() - began
            return await self._fill(load, "store", claimed.content_bytes, rest, span, begin_s)
        finally:
            rest.close()

    async def _fill(
        self,
        load: Load,
        source: str,
        content_bytes: int,
        content: Iterable[Part | Envelope],
        span: Span,
        begin_s: float = 0.0,
    ) -> HostEntry:
        """Reserve room, copy, verify and scale. `begin_s`: time that it took to learn the size."""
        (revision_id, scale), began = split_scaled_id(load.key), time.monotonic()
        entry = await self._host.reserve(load.key, content_bytes, functools.partial(setattr, load, "pending_error"))
        self._ended("room", time.monotonic() - began, span)

        def fill(stop: Stop) -> tuple[Envelope, float, float]:
            at = time.monotonic()
            envelope = write_content(content, entry.open_packed(), content_bytes, stop, as_object=False)
            self._acceptance.trust.check_object(envelope)
            copied_at = time.monotonic()
            self._acceptance.prepare(revision_id, entry.packed)
            if scale != 1:
                scale_packed(entry.packed, scale)
            return envelope, copied_at - at, time.monotonic() - copied_at

        async with self._host.filling(entry):
            try:
                entry.envelope, copy_s, check_s = await self._threads.run(fill)
            except AdapterUnsupported as error:
                self._refusals[load.key] = str(error)
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
                raise
        self._ended("fetch" if source == "store" else "copy", begin_s + copy_s, span, ended_s_ago=check_s)
        self._ended("check", check_s, span)
        return entry

    def _ended(self, stage: str, duration_s: float, span: Span, *, ended_s_ago: float = 0.0) -> None:
        self._metrics.observe_stage(stage, duration_s)
        span.stage(stage, duration_s, ended_s_ago=ended_s_ago)

    async def into_engine(self, entry: HostEntry, span: Span = NO_SPAN) -> None:
        """Load an entry into the engine, one caller at a time per revision.

        Raises AdapterRefusedByEngine and EngineError.
        """
        if entry.state is HostState.RESIDENT:
            return
        engine_number, began = self._engine_number, time.monotonic()
        with self._host.held(entry):
            entry.may_be_in_engine = True
            try:
                await self._engine.load_adapter(entry.revision_id, entry.directory, _ENGINE_TIMEOUT_S)
            except AdapterNotTaken as error:
                was_complete = entry.packed.is_file()
                await self._host.discard(entry)
                if not was_complete:  # removed by somebody else; the adapter is not at fault
                    raise
                reason = str(error).replace(str(entry.directory), entry.revision_id)
                raise AdapterRefusedByEngine(f"the engine does not take {entry.revision_id}: {reason}") from error
            if engine_number != self._engine_number:
                raise EngineUnreachable("the engine ended while the adapter was being loaded")
            self._host.set_state(entry, HostState.RESIDENT)
            self._host.use(entry, self._lease_s)
        self._ended("engine", time.monotonic() - began, span)
        self._on_resident(entry.revision_id)

    async def _check_size(self, claimed: Envelope) -> None:
        """Raise StoreCorrupt if an object's size contradicts its envelope, which would make it an AdapterTooLarge."""
        store = self._store
        found = await self._threads.run(lambda _: store().find(claimed.revision_id))
        if found is None:
            raise _not_stored(claimed.revision_id)
        if found.num_bytes != claimed.object_bytes:
            raise StoreCorrupt(
                f"the store's object of {claimed.revision_id} claims {claimed.object_bytes} bytes and has "
                f"{found.num_bytes}; run the store's fsck with repair and import the adapter again"
            )

    async def write_to_disk(self, entry: HostEntry) -> None:
        """Copy an entry that is in a store to the disk cache. Raises AdapterTooLarge and DiskCacheFull."""
        envelope = entry.envelope
        assert envelope is not None
        assert not entry.is_memory_only
        with self._host.held(entry):
            began = time.monotonic()
            num_bytes = envelope.object_bytes - ENVELOPE_BYTES
            await self._disk.write(entry.revision_id, num_bytes, lambda: content_in_memory(entry.packed, envelope))
            self._metrics.observe_stage("disk_write", time.monotonic() - began)


def _not_stored(revision_id: str) -> RevisionNotStored:
    return RevisionNotStored(f"the adapter store has no {revision_id}; import the adapter again")
