"""The adapter store: one object per revision, complete or absent, in a folder or in object storage."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

from fsspec.core import url_to_fs

from adapters.errors import AdapterError
from adapters.files.durable import make_folder, whole_file
from adapters.files.work_folder import work_folder
from adapters.store import layout
from adapters.store.envelope import Envelope, Part, begin_content, content_of, object_bytes
from adapters.store.errors import RevisionNotStored, StoreConflict, StoreCorrupt, StoreUnavailable, disk_full_at
from adapters.store.local_objects import LocalObjects
from adapters.store.objects import CHUNK_BYTES, Objects
from adapters.store.s3_objects import S3Access, S3Objects
from adapters.store.signing import Signer


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A revision's object, as a listing shows it."""

    revision_id: str
    num_bytes: int  # with its envelope
    modified_s: float  # Unix time of its last publication, by the clock of the storage


def open_store(url: str, s3: S3Access | None = None, signer: Signer | None = None) -> AdapterStore:
    """Open the store at `file:///folder`, created if it is missing, or `s3://bucket/prefix`, which must exist.

    Raises ValueError for another URL, StoreUnavailable for a folder that cannot be created.
    """
    return AdapterStore(open_objects(url, s3), signer)


def open_objects(url: str, s3: S3Access | None = None) -> Objects:
    """The objects of a store, or of something else. Raises as `open_store`."""
    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/") or scheme not in ("file", "s3"):
        raise ValueError(f"the adapter store {url!r} is neither file:///folder nor s3://bucket/prefix")
    if scheme == "s3":
        filesystem, root = url_to_fs(url, **(s3 or S3Access()).filesystem_options())
        return S3Objects(filesystem, root, url)
    filesystem, root = url_to_fs(url)
    objects = LocalObjects(filesystem, root, url)
    objects.make_root()
    return objects


class AdapterStore:
    """Revisions' bytes by revision id. Safe for threads and processes. Any method may raise StoreUnavailable."""

    def __init__(self, objects: Objects, signer: Signer | None = None) -> None:
        """`signer` signs what is published."""
        self._objects = objects
        self._signer = signer

    @property
    def url(self) -> str:
        return self._objects.url

    @property
    def can_sign(self) -> bool:
        return self._signer is not None

    def signed(self, envelope: Envelope) -> Envelope:
        """The envelope as this store would publish it."""
        return envelope if self._signer is None else self._signer.signed(envelope)

    def sign(self, revision_id: str) -> bool:
        """Verify a stored object's content and publish it again with this store's signature; False if it has that.

        Trusts the content. Raises RevisionNotStored and StoreCorrupt.
        """
        key = layout.key_of(revision_id)
        found = self._verified(key, revision_id)
        wanted = self.signed(found)
        if found == wanted:
            return False
        with tempfile.TemporaryFile() as file:
            for part in self._content(key, revision_id):
                if not isinstance(part, Envelope):
                    file.write(part)
            self._write(wanted, file, key)
        return True

    def publish(self, revision_id: str, source: Path) -> Envelope:
        """Store a file as a revision's bytes. On return the object is durable and has been read back.

        If the same bytes are already stored, the object's age is reset, so that no clean-up removes it under an import;
        a damaged object is replaced. Raises StoreConflict if other bytes are stored, StoreFull, and StoreCorrupt if the
        storage does not return what was written.
        """
        key = layout.key_of(revision_id)
        with source.open("rb") as file:
            wanted = self.signed(_envelope_of(revision_id, file))
            if not (self._is_stored_as(wanted, key) and self._reset_age(key)):
                self._write(wanted, file, key)
        return wanted

    def copy(self, revision_id: str, source: AdapterStore) -> Envelope:
        """Store another store's object, with its signature, also over a damaged one. Raises as its `fetch`."""
        with work_folder("backup") as folder:
            envelope = source.fetch(revision_id, folder / "object")
            with (folder / "object").open("rb") as file:
                self._write(envelope, file, layout.key_of(revision_id))
        return envelope

    def fetch(self, revision_id: str, destination: Path) -> Envelope:
        """Write a revision's verified content to `destination`, complete or not at all.

        A killed process may leave a `.<name>.<uuid>` beside `destination`. Raises RevisionNotStored, StoreCorrupt, and
        StoreFull if there is no room at `destination`.
        """
        with disk_full_at(destination):
            make_folder(destination.parent)
            with whole_file(destination) as temporary, temporary.open("xb") as file:
                for part in self._content(layout.key_of(revision_id), revision_id):
                    if isinstance(part, Envelope):
                        envelope = part
                    else:
                        file.write(part)
                file.flush()
                os.fsync(file.fileno())
        return envelope

    def begin_read(self, revision_id: str) -> tuple[Envelope, Generator[Part | Envelope, None, None]]:
        """Return the object's envelope, which has its size, and the content as `envelope.content_of` yields it.

        With one request. Raises RevisionNotStored and StoreCorrupt. Close the generator unless it is read to its end.
        """
        key = layout.key_of(revision_id)
        return begin_content(self._read(key, revision_id), key, revision_id)

    def verify(self, revision_id: str) -> Envelope:
        """Read and check a revision's whole object. Raises RevisionNotStored and StoreCorrupt."""
        return self._verified(layout.key_of(revision_id), revision_id)

    def exists(self, revision_id: str) -> bool:
        """True if the revision has an object; only `verify` tells whether it is intact."""
        return self.find(revision_id) is not None

    def find(self, revision_id: str) -> StoredObject | None:
        """The entry of a revision's object in a listing, if it has one."""
        info = self._objects.info(layout.key_of(revision_id))
        if info is None or info.is_folder:
            return None
        return StoredObject(revision_id, info.num_bytes, info.modified_s)

    def list(self) -> Iterator[StoredObject]:
        """All revisions' objects, ascending by revision id. At most 1/256 of the entries are in memory at a time."""
        for shard in self._objects.list_folder(layout.REVISIONS):
            if not shard.is_folder:
                continue
            for info in self._objects.list_folder(shard.key):
                revision_id = layout.revision_of(info.key)
                if revision_id is not None and not info.is_folder:
                    yield StoredObject(revision_id, info.num_bytes, info.modified_s)

    def delete(self, revision_id: str) -> None:
        """Delete a revision's object. A missing one is fine."""
        self._objects.delete(layout.key_of(revision_id))

    def quarantine(self, revision_id: str) -> str | None:
        """Move a revision's damaged object to quarantine/; return its new key. Raises RevisionNotStored.

        If it is intact, because an import has just replaced the damaged one, move it back and return None.
        """
        target = layout.new_quarantine_key(revision_id)
        try:
            self._objects.move(layout.key_of(revision_id), target)
        except FileNotFoundError:
            raise self._not_stored(revision_id) from None
        try:
            self._verified(target, revision_id)
        except StoreCorrupt:
            return target
        self._objects.move(target, layout.key_of(revision_id))
        return None

    def incoming_older_than(self, age_s: float) -> Iterator[str]:
        """Keys of objects that publishers have begun and not touched for `age_s` seconds."""
        latest_s = time.time() - age_s
        for info in self._objects.list_folder(layout.INCOMING):
            if not info.is_folder and info.modified_s <= latest_s:
                yield info.key

    def delete_incoming(self, key: str) -> None:
        """Delete what a publisher left. If it is gone, that is fine."""
        self._objects.delete(key)

    def _write(self, wanted: Envelope, file: IO[bytes], key: str) -> None:
        """Publish an object. After a failure nothing of it stays, if the storage still works."""
        temporary = layout.new_incoming_key()
        try:
            self._objects.write(temporary, _object_of(wanted, file))
            if self._verified(temporary, wanted.revision_id) != wanted:
                raise StoreCorrupt(f"{temporary} in {self.url} is another object than was written; store it again")
            self._objects.move(temporary, key)
        except BaseException as error:
            try:
                self._objects.delete(temporary)
            except AdapterError:
                pass  # the first error is raised; a clean-up finds what is left
            if isinstance(error, (FileNotFoundError, RevisionNotStored)):
                raise StoreUnavailable(
                    f"{temporary} in {self.url} was deleted while it was published; try again, and give clean-ups a "
                    "greater age"
                ) from error
            raise

    def _reset_age(self, key: str) -> bool:
        """False if the object has been deleted meanwhile."""
        try:
            self._objects.touch(key)
        except FileNotFoundError:
            return False
        return True

    def _is_stored_as(self, wanted: Envelope, key: str) -> bool:
        """True if the object is stored, intact and signed like this. Raises StoreConflict if it has other content."""
        try:
            found = self._verified(key, wanted.revision_id)
        except (RevisionNotStored, StoreCorrupt):
            return False
        if found.statement != wanted.statement:
            raise StoreConflict(
                f"{self.url} holds {wanted.revision_id} as {found.content_bytes} bytes of SHA-256 "
                f"{found.content_sha256}, these are {wanted.content_bytes} bytes of {wanted.content_sha256}; a "
                "revision is stored in one dtype: use another store for another one, or delete the revision first"
            )
        return found == wanted

    def _verified(self, key: str, revision_id: str) -> Envelope:
        for part in self._content(key, revision_id):
            if isinstance(part, Envelope):
                return part
        raise AssertionError("content ends with its envelope")

    def _content(self, key: str, revision_id: str) -> Iterator[Part | Envelope]:
        return content_of(self._read(key, revision_id), key, revision_id)

    def _read(self, key: str, revision_id: str) -> Iterator[bytes]:
        try:
            yield from self._objects.read(key, object_bytes)
        except FileNotFoundError:  # it is absent, or deleted meanwhile
            raise self._not_stored(revision_id) from None

    def _not_stored(self, revision_id: str) -> RevisionNotStored:
        self._objects.check_root()
        return RevisionNotStored(f"the adapter store {self.url} has no {revision_id}; import the adapter again")


def _envelope_of(revision_id: str, file: BufferedReader) -> Envelope:
    digest = hashlib.file_digest(file, "sha256")
    return Envelope(revision_id, digest.hexdigest(), file.tell())


def _object_of(envelope: Envelope, file: IO[bytes]) -> Iterator[bytes]:
    yield envelope.encode()
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
    if envelope.signature:
        yield envelope.signature
