"""SHA-256 by threads, which takes longer than to read and to write."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeAlias

Part: TypeAlias = bytes | memoryview

_CHUNK_BYTES = 8 * 1024**2
_MOST_THREADS = 16


def sha256_of_chunks(data: memoryview, also: Callable[[int, memoryview], object] | None = None) -> str:
    """The SHA-256 of the SHA-256 digests of its chunks of 8 MiB, 64 hex digits.

    Threads make those at the same time; `also` is called in them with the place of each chunk, and the chunk.
    """

    def digest(begin: int) -> bytes:
        chunk = data[begin : begin + _CHUNK_BYTES]
        if also is not None:
            also(begin, chunk)
        return hashlib.sha256(chunk).digest()

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "digest") as threads:
        digests = threads.map(digest, range(0, len(data), _CHUNK_BYTES))
        return hashlib.sha256(b"".join(digests)).hexdigest()


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
