"""SHA-256 of what is read and written at the same time."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeAlias

Part: TypeAlias = bytes | memoryview


class Digest:
    """SHA-256 of parts. A thread hashes each of them while the caller writes it and reads the next.

    Hashing takes longer than reading and writing together. Parts must not change.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "digest")  # starts with its first work
        self._hashing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def update(self, part: Part, *, is_all: bool = False) -> None:
        """Take the next part. A thread is not worth it where the part `is_all` of the content."""
        if is_all:
            self._digest.update(part)
            return
        self._wait()
        self._hashing = self._thread.submit(self._digest.update, part)

    def hexdigest(self) -> str:
        """Of all parts."""
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._hashing is not None:
            self._hashing.result()
