"""Adapters that a router sends because no store has them: straight into host memory, and never to a disk."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from adapters.store import Envelope
from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.errors import AdapterNotReceived, HostMemoryFull
from prefill_worker.residency.loading.load_queue import LoadQueue
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import WorkThreads
from prefill_worker.residency.tiers.host_memory import HostEntry, HostMemory, HostState
from prefill_worker.residency.tiers.objects import is_no_room, write_all


class Receiver:
    """Fills entries of host memory from a stream. A revision is received or loaded, never both at once."""

    def __init__(
        self, acceptance: Acceptance, host: HostMemory, threads: WorkThreads, metrics: ResidencyMetrics
    ) -> None:
        self._acceptance = acceptance
        self._host = host
        self._threads = threads
        self._metrics = metrics
        self._ended: dict[str, asyncio.Event] = {}  # of the revisions that are being received

    async def ended(self, revision_id: str) -> None:
        """Return when the revision is not being received."""
        while (ended := self._ended.get(revision_id)) is not None:
            await ended.wait()

    @asynccontextmanager
    async def alone(self, revision_id: str, queue: LoadQueue) -> AsyncIterator[None]:
        """Inside, nobody else receives the revision and no load of it goes on; those under way are waited for."""
        while revision_id in self._ended or revision_id in queue:
            await self.ended(revision_id)
            await queue.ended(revision_id)
        ended = self._ended[revision_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._ended[revision_id]
            ended.set()

    async def receive(
        self, wanted: Envelope, content: AsyncIterator[bytes], waits: Callable[[HostMemoryFull | None], None]
    ) -> HostEntry:
        """A new entry in host memory, whole and checked. To be called while `alone`. However it fails, nothing stays.

        `waits` is told as by `HostMemory.reserve`. Raises AdapterNotReceived where the content is not what is `wanted`,
        AdapterTooLarge, and as `Acceptance.prepare`.
        """
        began = time.monotonic()
        entry = await self._host.reserve(wanted.revision_id, wanted.content_bytes, waits)
        entry.is_memory_only = True
        try:
            await self._fill(entry, wanted, content)
            await self._threads.run(lambda _: self._acceptance.prepare(wanted.revision_id, entry.packed))
        except BaseException as error:
            await self._host.discard(entry)
            if isinstance(error, OSError) and is_no_room(error):
                await self._host.shrink()  # for the next attempt
                raise AdapterNotReceived(
                    f"{entry.directory.parent.parent} has no room for {wanted.revision_id} ({error.strerror}) although "
                    "residency.host_bytes has: lower it, or give this worker more shared memory, and send it again"
                ) from error
            raise
        entry.envelope = wanted
        self._metrics.observe_stage("receive", time.monotonic() - began)
        self._host.settle(entry, HostState.IN_MEMORY)
        return entry

    async def _fill(self, entry: HostEntry, wanted: Envelope, content: AsyncIterator[bytes]) -> None:
        digest, num_bytes = hashlib.sha256(), 0
        await self._threads.run(lambda _: entry.directory.mkdir())
        with entry.packed.open("xb", buffering=0) as file:

            def take(chunk: bytes) -> None:
                digest.update(chunk)
                write_all(file, chunk)

            async for chunk in content:
                num_bytes += len(chunk)
                if num_bytes > wanted.content_bytes:
                    break
                await self._threads.run_to_end(partial(take, chunk))
        if num_bytes != wanted.content_bytes or digest.hexdigest() != wanted.content_sha256:
            more = "more than " if num_bytes > wanted.content_bytes else ""
            raise AdapterNotReceived(
                f"of {wanted.revision_id} should have come {wanted.content_bytes} bytes of SHA-256 "
                f"{wanted.content_sha256}, but {more}{min(num_bytes, wanted.content_bytes)} bytes of SHA-256 "
                f"{digest.hexdigest()} did; send it again"
            )
