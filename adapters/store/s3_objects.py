"""Objects in a bucket of S3 or of a compatible storage."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import fsspec

from adapters.store.objects import CHUNK_BYTES, Objects

_FIRST_PART_BYTES = 8 * 1024**2  # enough for most adapters; a larger one takes two round trips
_PART_BYTES = 4 * 1024**2
_PARTS_AHEAD = 4  # read-ahead in memory per reader, beside the current part


@dataclass(frozen=True, slots=True)
class S3Access:
    """How to reach a bucket. Keys default to the profile's, and that to the environment, as for every AWS client."""

    endpoint_url: str | None = None  # None: AWS itself
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0  # between two pieces of a response, not for all of it
    profile: str | None = None  # in the files of AWS clients
    max_attempts: int = 3  # per request, with exponential back-off; twice as many for a response that broke off

    def filesystem_options(self) -> dict[str, Any]:
        """Keyword arguments of fsspec's S3 filesystem."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": self.access_key,
            "secret": self.secret_key,
            **({} if self.profile is None else {"profile": self.profile}),
            "client_kwargs": {} if self.region is None else {"region_name": self.region},
            "config_kwargs": {
                "connect_timeout": self.connect_timeout_s,
                "read_timeout": self.read_timeout_s,
                "retries": {"total_max_attempts": self.max_attempts, "mode": "standard"},
            },
            # Listings go stale: other processes publish and delete.
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }


class S3Objects(Objects):
    """A key appears with its whole content, when an upload is completed or a copy is done."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        import aiohttp  # here, because a store in a folder needs none of these
        import botocore.exceptions

        super().__init__(filesystem, root, url)
        self._failures = (
            OSError,
            aiohttp.ClientError,
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
        )
        self._ground = self._root.partition("/")[0]
        # botocore retries requests; s3fs retries bodies that break off, which botocore cannot. Once more is enough.
        filesystem.retries = 2

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        with self.reaching(key):
            file = self._filesystem.open(self.path_of(key), "wb", block_size=CHUNK_BYTES)
        try:
            for chunk in chunks:
                with self.reaching(key):
                    file.write(chunk)
            with self.reaching(key):
                file.close()
        except FileNotFoundError:
            self.check_root()
            raise
        finally:
            if not file.closed:  # closing it would upload a part of the object
                file.closed = True
                with self.reaching(key):
                    file.discard()

    def read(self, key: str, size_in: Callable[[bytes], int] | None = None) -> Iterator[bytes]:
        """Yield the object's bytes in parts, with read-ahead: one connection to S3 is slow.

        No request precedes that of the first part, which also tells whether the object exists. If the key is
        overwritten meanwhile, parts of two objects can mix; the caller detects that by a digest.
        """
        parts, length = deque([self._part(key, 0, _FIRST_PART_BYTES)]), _FIRST_PART_BYTES
        end, size = length, None
        try:
            while True:
                with self.reaching(key):
                    part = _unless_past_the_end(parts.popleft())
                if size is None:
                    size = size_in(part) if part and size_in is not None else 0
                if part:
                    yield part
                if len(part) < length:  # the only proof of the end, whatever size the object claims
                    return
                length = _PART_BYTES
                while not parts or (len(parts) < _PARTS_AHEAD and end < size):
                    parts.append(self._part(key, end, length))
                    end += length
        finally:
            for part_to_come in parts:
                part_to_come.cancel()

    def move(self, source: str, target: str) -> None:
        with self.reaching(target):
            self._filesystem.cp_file(self.path_of(source), self.path_of(target))
        self.delete(source)

    def touch(self, key: str) -> None:
        path = self.path_of(key)
        with self.reaching(key):
            self._filesystem.cp_file(path, path, MetadataDirective="REPLACE")

    def _part(self, key: str, begin: int, length: int) -> Future[bytes]:
        """A part to come. fsspec's names of asynchronous methods begin with `_`.

        Its readers with read-ahead ask for the object's size first, which is one more round trip per adapter.
        """
        filesystem = self._filesystem
        coming = filesystem._cat_file(self.path_of(key), start=begin, end=begin + length)
        return asyncio.run_coroutine_threadsafe(coming, filesystem.loop)


def _unless_past_the_end(part: Future[bytes]) -> bytes:
    """A part's bytes; none if the object ended before it."""
    try:
        return part.result()
    except OSError as error:
        answer = getattr(error.__cause__, "response", None) or {}
        if answer.get("Error", {}).get("Code") in ("InvalidRange", "416"):
            return b""
        raise
