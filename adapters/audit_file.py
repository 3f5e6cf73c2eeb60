"""The audit log as a file of JSON lines. Several processes may append to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from adapters.catalog.records import AuditEvent


class AuditFile:
    """Appends to one file, which is opened anew for each batch, so that it may be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, events: Sequence[AuditEvent]) -> None:
        """Append a line for each event and have them written to the disk. Raises OSError."""
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while lines:  # one write, unless the disk is full
                lines = lines[os.write(descriptor, lines) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def newest(self, limit: int, tenant: str | None = None) -> Sequence[AuditEvent]:
        """The newest events, or those of a tenant's principals, the oldest of them first. Raises OSError."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            events = (msgspec.json.decode(line, type=AuditEvent) for line in file)
            found = [event for event in events if tenant is None or event.tenant == tenant]
        return found[-limit:]
