"""Folders of evicted adapters, kept for the next adapters of the same size.

To free memory and allocate it again costs more than the copy into it: the kernel clears the pages, and the engine maps
and page-locks them again (`engine/adapter_slots/kept_files.py`). So while loads wait for room, the folder of an evicted
adapter of their size is kept, and the next adapter is written over it. Spare folders count as free memory of the
budget.
"""

from collections import Counter, deque
from pathlib import Path


class SpareFolders:
    """Tracks spare folders, and the sizes that are in demand."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._folders: deque[tuple[Path, int]] = deque()  # and its bytes, the oldest first
        self._wanted: Counter[int] = Counter()  # reservations that wait, by bytes

    def want(self, num_bytes: int) -> None:
        """Note a reservation that waits for room; each ends with `want_no_more`."""
        self._wanted[num_bytes] += 1

    def want_no_more(self, num_bytes: int) -> None:
        self._wanted[num_bytes] -= 1
        if not self._wanted[num_bytes]:
            del self._wanted[num_bytes]

    def is_wanted(self, num_bytes: int) -> bool:
        """Whether a folder of that size is worth keeping."""
        return num_bytes in self._wanted

    def add(self, folder: Path, num_bytes: int) -> None:
        self._folders.append((folder, num_bytes))
        self.num_bytes += num_bytes

    def has(self, num_bytes: int) -> bool:
        return any(size == num_bytes for _, size in self._folders)

    def take(self, num_bytes: int) -> Path | None:
        """A folder of exactly that size, if there is one."""
        for number, (folder, size) in enumerate(self._folders):
            if size == num_bytes:
                del self._folders[number]
                self.num_bytes -= size
                return folder
        return None

    def drop(self, max_bytes: int) -> list[Path]:
        """Folders to delete, the oldest first, so that the others take at most `max_bytes`."""
        dropped = []
        while self.num_bytes > max_bytes:
            folder, size = self._folders.popleft()
            self.num_bytes -= size
            dropped.append(folder)
        return dropped
