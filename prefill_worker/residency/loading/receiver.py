"""Receives adapters that routers push because no store has them: into host memory, never to a disk."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from adapters.errors import AdapterMalformed
from adapters.packed import announced_sha256, read_packed
from adapters.packed.metadata import CHUNKED
from adapters.store import Envelope
from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.errors import AdapterNotReceived, HostMemoryFull
from prefill_worker.residency.loading.load_queue import LoadQueue
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import WorkThreads
from prefill_worker.residency.tiers.host_entry import HostEntry
from prefill_worker.residency.tiers.host_memory import HostMemory
from prefill_worker.residency.tiers.objects import write_all


class Receiver:
    """Fills entries of host memory from a stream. A revision is never received and loaded concurrently."""

    def __init__(
        self, acceptance: Acceptance, host: HostMemory, threads: WorkThreads, metrics: ResidencyMetrics
    ) -> None:
        self._acceptance = acceptance
        self._host = host
        self._threads = threads
        self._metrics = metrics
        self._receiving: dict[str, asyncio.Event] = {}  # revision -> set when its push ends

    async def wait_until_ended(self, revision_id: str) -> None:
        """Return when the revision is not being received."""
        while (ended := self._receiving.get(revision_id)) is not None:
            await ended.wait()

    @asynccontextmanager
    async def exclusive(self, revision_id: str, queue: LoadQueue) -> AsyncIterator[None]:
        """Wait for pushes and loads of the revision to end, and hold off others inside the context."""
        while revision_id in self._receiving or revision_id in queue:
            await self.wait_until_ended(revision_id)
            await queue.wait_until_ended(revision_id)
        ended = self._receiving[revision_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._receiving[revision_id]
            ended.set()

    async def receive(
        self,
        announced: Envelope,
        content: AsyncIterator[bytes],
        on_blocked: Callable[[HostMemoryFull | None], None],
        path: str = "",
    ) -> HostEntry:
        """Create an entry in host memory, complete and verified. Call it inside `exclusive`. A failure leaves nothing.

        The file at `path`, if this host has it, is taken instead of the content. `on_blocked`: see
        `HostMemory.reserve`. Raises AdapterNotTrusted, AdapterNotReceived if the content is not what was announced or
        does not fit in shared memory, AdapterTooLarge, HostMemoryFull, and as `Acceptance.prepare`.
        """
        self._acceptance.trust.check_push(announced)
        began = time.monotonic()
        entry = await self._host.reserve(announced.revision_id, announced.content_bytes, on_blocked)
        entry.is_memory_only = True
        try:
            async with self._host.filling(entry):
                share = partial(entry.share, Path(path), announced.content_bytes)
                if not await self._threads.run_to_end(share):
                    await self._fill(entry, announced, content)
                await self._threads.run_to_end(partial(_check, entry, announced))
                prepare = partial(self._acceptance.prepare, announced.revision_id, entry.packed, is_memory_only=True)
                await self._threads.run(lambda _: prepare())
                entry.envelope = announced
        except HostMemoryFull as full:
            raise AdapterNotReceived(f"{full}; send it again") from full
        self._metrics.observe_stage("receive", time.monotonic() - began)
        return entry

    async def _fill(self, entry: HostEntry, announced: Envelope, content: AsyncIterator[bytes]) -> None:
        num_bytes = 0
        with await self._threads.run_to_end(entry.open_packed) as file:
            async for chunk in content:
                num_bytes += len(chunk)
                if num_bytes > announced.content_bytes:
                    break
                await self._threads.run_to_end(partial(write_all, file, chunk))
            file.truncate()
        if num_bytes != announced.content_bytes:
            more = "more than " if num_bytes > announced.content_bytes else ""
            raise AdapterNotReceived(
                f"{announced.revision_id}: expected {announced.content_bytes} bytes, received {more}"
                f"{min(num_bytes, announced.content_bytes)} bytes; send it again"
            )


def _check(entry: HostEntry, announced: Envelope) -> None:
    """Raises AdapterNotReceived unless it is the file that was announced."""
    if (found := announced_sha256(entry.packed)) != announced.content_sha256:
        raise AdapterNotReceived(
            f"{announced.revision_id}: expected content with SHA-256 {announced.content_sha256}, received {found}; "
            "send it again"
        )
    packed = read_packed(entry.packed)
    if packed.metadata.format == CHUNKED and not entry.is_shared:  # nothing has carried a file that is shared
        try:
            packed.check_digest()
        except AdapterMalformed as error:
            raise AdapterNotReceived(f"{announced.revision_id} is damaged: {error}; send it again") from error
