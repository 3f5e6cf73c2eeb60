"""The disk tier: one object per revision in a folder that outlives the agent.

A file is an object as in the store and contains its own digest. So nothing is fsynced: damage by a crash, a bad disk or
a stray edit is detected on the next read. A new agent takes the order in which they were written for that of their use.
"""

import asyncio
import logging
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from adapters.errors import AdapterTooLarge
from adapters.identity import folder_of
from adapters.store import Envelope
from adapters.store.envelope import ENVELOPE_BYTES, Part
from cluster.control.worker_state import WorkerStateHub
from prefill_worker.residency.errors import AdapterInUse, DiskCacheFull
from prefill_worker.residency.metrics import ResidencyMetrics
from prefill_worker.residency.threads import Stop, WorkThreads
from prefill_worker.residency.tiers.objects import checked_content, write_content
from process.exhaustion import is_disk_full

log = logging.getLogger(__name__)

_OBJECT_NAME = re.compile(r"sha256-([0-9a-f]{64})")
_TEMPORARY_NAME = re.compile(r"\.sha256-[0-9a-f]{64}\.[0-9a-f]{32}")
_RETRY_AFTER_S = 5.0
_MAX_FAILURES = 8  # deletions that fail, in one eviction


@dataclass(eq=False, slots=True)
class DiskEntry:
    """One revision's file."""

    revision_id: str
    num_bytes: int
    num_readers: int = 0
    is_written: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # set while it is neither written nor deleted


class DiskCache:
    """Owns the folder. A budget of 0 disables it. A file that cannot be deleted stays and counts against the budget."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        threads: WorkThreads,
        hub: WorkerStateHub,
        metrics: ResidencyMetrics,
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._threads = threads
        self._changed = hub.change_on_disk
        self._metrics = metrics
        self._entries: OrderedDict[str, DiskEntry] = OrderedDict()  # least recently used first

    def __contains__(self, revision_id: str) -> bool:
        entry = self._entries.get(revision_id)
        return entry is not None and entry.is_written

    def __len__(self) -> int:
        return len(self._entries)

    async def open(self) -> None:
        """Take over the files of an earlier agent, within the budget. Raises OSError."""
        found = await self._threads.run(self._scan)
        for revision_id, num_bytes in found:
            entry = self._entries[revision_id] = DiskEntry(revision_id, num_bytes, is_written=True)
            entry.settled.set()
            self.used_bytes += num_bytes
        while self.used_bytes > self.budget_bytes and await self._evict_one():
            pass
        if self._entries:
            self._changed(list(self._entries), [])

    def use(self, revision_id: str) -> None:
        """Mark a revision as most recently used."""
        if revision_id in self._entries:
            self._entries.move_to_end(revision_id)

    def content_bytes(self, revision_id: str) -> int:
        """Size of the packed file in a revision's object, with its signature."""
        return self._entries[revision_id].num_bytes - ENVELOPE_BYTES

    @contextmanager
    def reading(self, revision_id: str) -> Iterator[Iterator[Part | Envelope]]:
        """A revision's content, to be read in a thread. It is not evicted inside. Reads raise StoreCorrupt."""
        entry = self._entries[revision_id]
        entry.num_readers += 1
        try:
            yield checked_content(self._path(revision_id), revision_id)
        finally:
            entry.num_readers -= 1

    async def write(
        self, revision_id: str, content_bytes: int, content: Callable[[], Iterable[Part | Envelope]]
    ) -> None:
        """Write a revision whose content is `content()`, which is called in a thread.

        Also returns without it, if a concurrent write of it failed or its file was being deleted. Raises
        AdapterTooLarge, DiskCacheFull, and what the content raises.
        """
        if (existing := self._entries.get(revision_id)) is not None:
            await existing.settled.wait()
            if existing.is_written or self._entries.get(revision_id) is not existing:
                return
            if error := await self._delete(existing, is_sound=False):  # damaged, and could not be deleted before
                raise self._unwritable(error) from error
            if revision_id in self._entries:  # a concurrent write
                return
        num_bytes = content_bytes + ENVELOPE_BYTES
        if num_bytes > self.budget_bytes:
            raise AdapterTooLarge(
                f"{revision_id} takes {num_bytes} bytes of disk, more than this worker's residency.disk_bytes of "
                f"{self.budget_bytes}; raise it"
            )
        entry = self._entries[revision_id] = DiskEntry(revision_id, num_bytes)
        self.used_bytes += num_bytes
        try:
            while self.used_bytes > self.budget_bytes:
                if not await self._evict_one():
                    raise self._full(revision_id, num_bytes)
            try:
                await self._write_in_thread(entry, content)
            except OSError as error:
                if not is_disk_full(error):
                    raise self._unwritable(error) from error
                # The disk is smaller than the budget, or others use it too.
                log.warning("disk full", extra={"fields": {"folder": str(self.folder), "error": str(error)}})
                freed = 0
                while freed < num_bytes and (evicted := await self._evict_one()):
                    freed += evicted
                try:
                    await self._write_in_thread(entry, content)
                except OSError as again:
                    if not is_disk_full(again):
                        raise self._unwritable(again) from again
                    raise self._full(revision_id, num_bytes) from again
        except BaseException:
            self._forget(entry)
            raise
        entry.is_written = True
        entry.settled.set()
        self.use(revision_id)
        self._changed([revision_id], [])

    async def remove(self, revision_id: str) -> bool:
        """Delete a revision's file; False if there is none. Raises AdapterInUse and DiskCacheFull."""
        entry = self._entries.get(revision_id)
        if entry is None:
            return False
        if not entry.is_written or entry.num_readers:
            raise AdapterInUse(f"{revision_id} is being copied to or from the disk; try again")
        if error := await self._delete(entry):
            raise self._unwritable(error) from error
        return True

    async def drop_damaged(self, revision_id: str) -> None:
        """Delete a damaged file, even while others read it."""
        if (entry := self._entries.get(revision_id)) is not None and entry.is_written:
            await self._delete(entry, is_sound=False)

    async def _write_in_thread(self, entry: DiskEntry, content: Callable[[], Iterable[Part | Envelope]]) -> None:
        content_bytes = entry.num_bytes - ENVELOPE_BYTES
        await self._threads.run(lambda stop: self._write(entry.revision_id, content_bytes, content(), stop))

    async def _evict_one(self) -> int:
        """Delete the least recently used evictable file; the bytes freed, 0 if there is none."""
        for _ in range(_MAX_FAILURES):
            victims = (entry for entry in self._entries.values() if self._is_evictable(entry))
            if (entry := next(victims, None)) is None:
                break
            if await self._delete(entry) is None:
                self._metrics.count_eviction("disk")
                return entry.num_bytes
        return 0

    def _is_evictable(self, entry: DiskEntry) -> bool:
        return entry.is_written and not entry.num_readers

    async def _delete(self, entry: DiskEntry, *, is_sound: bool = True) -> OSError | None:
        """Delete a file. On failure returns the error; a sound file is then usable again, and most recently used."""
        entry.settled.clear()
        entry.is_written = False  # no longer found, but its bytes count until it is deleted
        self._changed([], [entry.revision_id])
        errors: list[OSError] = []

        def delete() -> None:
            try:
                self._path(entry.revision_id).unlink(missing_ok=True)
            except OSError as error:
                errors.append(error)

        try:
            await self._threads.run_to_end(delete)
        finally:
            if errors:
                self._on_not_deleted(entry, errors[0], is_sound)
            else:
                self._forget(entry)
        return errors[0] if errors else None

    def _on_not_deleted(self, entry: DiskEntry, error: OSError, is_sound: bool) -> None:
        fields = {"revision": entry.revision_id, "error": str(error)}
        log.warning("disk cache delete failed", extra={"fields": fields})
        self._metrics.count_disk_failure()
        self._entries.move_to_end(entry.revision_id)  # others are tried first, it again later
        if is_sound:
            entry.is_written = True
            self._changed([entry.revision_id], [])
        entry.settled.set()

    def _forget(self, entry: DiskEntry) -> None:
        if self._entries.get(entry.revision_id) is entry:
            del self._entries[entry.revision_id]
            self.used_bytes -= entry.num_bytes
        entry.settled.set()

    def _full(self, revision_id: str, num_bytes: int) -> DiskCacheFull:
        return DiskCacheFull(
            f"the disk has no room for the {num_bytes} bytes of {revision_id} in {self.folder}: of "
            f"residency.disk_bytes {self.budget_bytes}, {self.used_bytes - num_bytes} are taken; free disk "
            "space",
            _RETRY_AFTER_S,
        )

    def _unwritable(self, error: OSError) -> DiskCacheFull:
        return DiskCacheFull(f"{self.folder} cannot be written ({error.strerror}); mend the disk", _RETRY_AFTER_S)

    def _path(self, revision_id: str) -> Path:
        return self.folder / folder_of(revision_id)

    # In a thread.

    def _scan(self, stop: Stop) -> list[tuple[str, int]]:
        """Revisions and their bytes, the oldest first. Deletes temporary files of agents that were killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = []
        with os.scandir(self.folder) as files:
            for number, file in enumerate(files):
                if number % 1024 == 0:
                    stop.check()
                if _TEMPORARY_NAME.fullmatch(file.name):
                    os.unlink(file.path)
                elif match := _OBJECT_NAME.fullmatch(file.name):
                    status = file.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, f"sha256:{match[1]}", status.st_size))
        return [(revision_id, num_bytes) for _, revision_id, num_bytes in sorted(found)]

    def _write(self, revision_id: str, content_bytes: int, content: Iterable[Part | Envelope], stop: Stop) -> None:
        path = self._path(revision_id)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            write_content(content, FileIO(temporary, "xb"), content_bytes, stop, as_object=True)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
