"""Mapped files of unloaded adapters, for the next adapters of the same size.

Mapping and page-locking a file of 80 MB takes tens of milliseconds, most of it for its 20,000 pages. While more
adapters are in demand than fit in host memory, every load would pay that. Instead, the worker's agent writes the next
adapter into the file of an evicted one (`prefill_worker/residency/tiers/spare_folders.py`), and the engine, which has
kept the file mapped, recognises it by its inode.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

_SWEEP_S = 0.2  # between looks for files that the agent has deleted instead: until then they still take memory

_Inode = tuple[int, int]


class KeptFiles:
    """Owns the mappings of files that hold no adapter now. Thread-safe."""

    def __init__(self, release: Callable[[torch.Tensor], None]) -> None:
        """`release` undoes what was done to a mapping beyond mapping it."""
        self._release = release
        self._lock = threading.Lock()
        self._files: dict[_Inode, tuple[int, torch.Tensor]] = {}  # open descriptor and mapping
        self._sweeper: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._files)

    def keep(self, path: Path, mapped: torch.Tensor) -> None:
        """Keep a file's mapping, or release it if the file is not there."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._release(mapped)
            return
        with self._lock:
            self._files[_inode(os.fstat(descriptor))] = (descriptor, mapped)
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep, name="kept files", daemon=True)
                self._sweeper.start()

    def take(self, path: Path, num_bytes: int) -> torch.Tensor | None:
        """The first `num_bytes` of the file's kept mapping [num_bytes], uint8; None if there is none as large."""
        with self._lock:
            descriptor, mapped = self._files.pop(_inode(os.stat(path)), (-1, None))
        if mapped is None:
            return None
        os.close(descriptor)
        if mapped.numel() < num_bytes:
            self._release(mapped)
            return None
        return mapped

    def release_deleted(self) -> None:
        """Release the mappings of files that have been deleted."""
        with self._lock:
            deleted = [key for key, (descriptor, _) in self._files.items() if not os.fstat(descriptor).st_nlink]
            gone = [self._files.pop(key) for key in deleted]
        while gone:
            descriptor, mapped = gone.pop()
            os.close(descriptor)
            self._release(mapped)
            del mapped  # the last reference: unmaps

    def _sweep(self) -> None:
        """Look for deleted files until none is kept."""
        while True:
            time.sleep(_SWEEP_S)
            self.release_deleted()
            with self._lock:
                if not self._files:
                    self._sweeper = None
                    return


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino
