"""The files that exports are written to. In shared memory, the next one is made beforehand."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from adapters.files.work_folder import WorkFolder
from adapters.packed import PACKED_NAME


class ExportFile:
    """A mapped file of `num_bytes`, in a folder of its own; `close` removes both. Blocking. Raises OSError."""

    def __init__(self, num_bytes: int, *, in_memory: bool) -> None:
        self.num_bytes = num_bytes
        self._folder = WorkFolder("export", in_memory=in_memory)
        try:
            with (self.folder / PACKED_NAME).open("w+b") as file:
                # Too little room is an error here; in the mapping it would be a signal.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                self.mapped = mmap.mmap(file.fileno(), 0)
        except BaseException:
            self._folder.close()
            raise

    @property
    def folder(self) -> Path:
        return self._folder.path

    def touch(self) -> None:
        """Have the kernel clear and map all pages now."""
        np.frombuffer(self.mapped, np.uint8)[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        self.mapped.close()
        self._folder.close()


class Exports:
    """Keeps a file in shared memory for the next export, of the last one's size.

    To allocate, clear and map its pages takes half of the time of an export. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: ExportFile | None = None
        self._is_closed = False

    @contextmanager
    def file(self, num_bytes: int, *, in_memory: bool) -> Iterator[ExportFile]:
        """A file to write an export to, for the duration of the block, and removed soon after."""
        found = self._replace(None) if in_memory else None
        if found is not None and found.num_bytes != num_bytes:
            found.close()
            found = None
        file = found or ExportFile(num_bytes, in_memory=in_memory)
        try:
            yield file
        finally:  # whoever waits for the export need not wait until its pages are unmapped
            threading.Thread(target=file.close, name="export").start()

    def prepare(self, num_bytes: int) -> None:
        """Make the next export's file. Where there is no room, that export will say so."""
        try:
            made = ExportFile(num_bytes, in_memory=True)
        except OSError:
            return
        made.touch()
        if (old := self._replace(made)) is not None:
            old.close()

    def close(self) -> None:
        self._is_closed = True
        if (old := self._replace(None)) is not None:
            old.close()

    def _replace(self, file: ExportFile | None) -> ExportFile | None:
        """Keep a file; return one that is to be closed or used."""
        with self._lock:
            if self._is_closed and file is not None:
                return file
            old, self._spare = self._spare, file
            return old
