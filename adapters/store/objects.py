"""Objects by key under one root, through fsspec: the common part of local folders and object storage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec

from adapters.store.errors import StoreFull, StoreUnavailable
from process.exhaustion import is_disk_full

CHUNK_BYTES = 8 * 1024**2  # of reads and of the parts of an upload; S3 takes at most 10,000 parts per object


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, or one folder of objects."""

    key: str
    num_bytes: int
    modified_s: float  # Unix time, by the clock of the storage
    is_folder: bool


class Objects(ABC):
    """Keys are relative to the root. Every method may raise StoreUnavailable. Thread-safe."""

    _failures: tuple[type[Exception], ...] = (OSError,)  # by which the storage reports that it does not work

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        self.url = url  # for messages
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._ground = self._root  # must exist even if the store is empty

    @abstractmethod
    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        """Write a new object, durable on return. Raises StoreFull; a failed write may leave a part of it at the key."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Move an object, durably, complete or not at all.

        A crash may leave it at both keys. Raises FileNotFoundError if it does not exist.
        """

    @abstractmethod
    def touch(self, key: str) -> None:
        """Set an object's modification time to now. Raises FileNotFoundError."""

    def read(self, key: str, size_in: Callable[[bytes], int] | None = None) -> Iterator[bytes]:
        """Yield the object's bytes in chunks. Raises FileNotFoundError.

        `size_in` tells the object's size from its first chunk, for read-ahead; a wrong size does not change the bytes.
        """
        with self.reaching(key):
            file = self._filesystem.open(self.path_of(key), "rb", block_size=CHUNK_BYTES, cache_type="none")
        with file:
            while True:
                with self.reaching(key):
                    chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def info(self, key: str) -> ObjectInfo | None:
        """The object or folder at a key, if there is one."""
        try:
            with self.reaching(key):
                return self._info_of(self._filesystem.info(self.path_of(key), refresh=True))
        except FileNotFoundError:
            self.check_root()
            return None

    def list_folder(self, folder: str) -> list[ObjectInfo]:
        """The entries directly in a folder, sorted by key. A missing folder is an empty one."""
        try:
            with self.reaching(folder):
                entries = self._filesystem.ls(self.path_of(folder), detail=True, refresh=True)
        except FileNotFoundError:
            self.check_root()
            return []
        infos = [self._info_of(entry) for entry in entries]
        return sorted((info for info in infos if info.key != folder), key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Delete an object. A missing one is fine."""
        try:
            with self.reaching(key):
                self._filesystem.rm_file(self.path_of(key))
        except FileNotFoundError:
            pass

    def path_of(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def reaching(self, key: str) -> Iterator[None]:
        """Convert the storage's failures to our errors, but FileNotFoundError: its meaning depends on the caller."""
        try:
            yield
        except FileNotFoundError:
            raise
        except self._failures as error:
            if is_disk_full(error):
                raise StoreFull(
                    f"the adapter store {self.url} has no room for {key} ({error.strerror}); "
                    "delete revisions that are not needed, run its fsck with repair, or make it larger"
                ) from error
            raise StoreUnavailable(
                f"the adapter store {self.url} failed at {key}: {_reason(error)}; check that it is reachable and that "
                "this process may read and write it, then try again"
            ) from error

    def check_root(self) -> None:
        """Raise StoreUnavailable if the store itself is missing: then a missing object means nothing."""
        try:
            with self.reaching(self._ground):
                self._filesystem.info(self._ground, refresh=True)
        except FileNotFoundError as error:
            raise StoreUnavailable(
                f"the adapter store {self.url} does not exist; mount the folder or create the bucket"
            ) from error

    def _info_of(self, entry: dict[str, Any]) -> ObjectInfo:
        modified = entry.get("mtime", entry.get("LastModified", 0.0))
        if isinstance(modified, datetime):  # S3; some storages have fractions of a second in listings only
            modified = modified.replace(microsecond=0).timestamp()
        return ObjectInfo(
            key=entry["name"].removeprefix(f"{self._root}/"),
            num_bytes=entry["size"] or 0,
            modified_s=float(modified or 0),
            is_folder=entry["type"] == "directory",
        )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
