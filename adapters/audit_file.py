"""The audit log as a file of JSON lines. Several processes may append to it."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from adapters.catalog.records import AuditEvent


class AuditFile:
    """Appends to one file, which is opened anew for each batch, so that it may be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, events: Sequence[AuditEvent]) -> None:
        """Append a line for each event and have them written to the disk. Raises OSError.

        After that, some of the lines may be there, the last of them torn. The next event begins a line of its own.
        """
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # else another process could tear its line between look and write
            if (size := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, size - 1) != b"\n":
                lines = b"\n" + lines
            while lines:  # one write, unless the disk is full
                lines = lines[os.write(descriptor, lines) :]
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def newest(
        self, limit: int, tenant: str | None = None, on_damaged: Callable[[int], None] = lambda _: None
    ) -> Sequence[AuditEvent]:
        """The newest events, or those of a tenant's principals, the oldest of them first. Raises OSError.

        `on_damaged` is called with the number of each line that is no event, such as one that a full disk has torn.
        """
        found: deque[AuditEvent] = deque(maxlen=limit)
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    event = msgspec.json.decode(line, type=AuditEvent)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    on_damaged(number)
                    continue
                if tenant is None or event.tenant == tenant:
                    found.append(event)
        return list(found)
