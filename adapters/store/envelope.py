"""The envelope at the start of every stored object, by which the object can be verified alone.

A revision id is a digest of what an adapter computes, not of the file that it is packed in, so it cannot show that the
file is intact. The envelope can:

    16 bytes  "prelude-object-1"
    32 bytes  the revision id's digest
    32 bytes  SHA-256 of the content
     8 bytes  size of the content, little-endian

The content follows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from adapters.store.errors import StoreCorrupt
from adapters.store.layout import digits_of

Part: TypeAlias = bytes | memoryview  # of an object's content

ENVELOPE_BYTES = 88
_MAGIC = b"prelude-object-1"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The identity, digest and size of one object's content."""

    revision_id: str
    content_sha256: str  # 64 hex digits
    content_bytes: int

    def encode(self) -> bytes:
        return b"".join(
            (
                _MAGIC,
                bytes.fromhex(digits_of(self.revision_id)),
                bytes.fromhex(self.content_sha256),
                self.content_bytes.to_bytes(8, "little"),
            )
        )

    @classmethod
    def decode(cls, head: bytes, key: str) -> Envelope:
        """Parse an object's first bytes. Raises StoreCorrupt."""
        if len(head) < ENVELOPE_BYTES or not head.startswith(_MAGIC):
            raise StoreCorrupt(
                f"{key} begins with {head[: len(_MAGIC)]!r} and not with the {ENVELOPE_BYTES} bytes of an envelope "
                f"({_MAGIC!r} …); run the store's fsck with repair and import the adapter again"
            )
        return cls(
            revision_id=f"sha256:{head[16:48].hex()}",
            content_sha256=head[48:80].hex(),
            content_bytes=int.from_bytes(head[80:88], "little"),
        )


def object_bytes(head: bytes) -> int:
    """The object's size as its first bytes claim it; 0 if they are no envelope."""
    try:
        return ENVELOPE_BYTES + Envelope.decode(head, "").content_bytes
    except StoreCorrupt:
        return 0


def content_of(chunks: Iterable[bytes], key: str, revision_id: str) -> Iterator[Part | Envelope]:
    """Yield an object's content in chunks, and then its envelope, against which the content has been checked.

    Raises StoreCorrupt, at the latest at the end; the chunks before must not be used then.
    """
    _, content = begin_content(chunks, key, revision_id)
    yield from content


def begin_content(
    chunks: Iterable[bytes], key: str, revision_id: str
) -> tuple[Envelope, Generator[Part | Envelope, None, None]]:
    """Return an object's envelope, and its content as `content_of` yields it. Raises StoreCorrupt."""
    chunks = iter(chunks)
    head = b""
    while len(head) < ENVELOPE_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    envelope = Envelope.decode(head, key)
    if envelope.revision_id != revision_id:
        raise StoreCorrupt(
            f"{key} should hold {revision_id}, but its envelope names {envelope.revision_id}; "
            "run the store's fsck with repair and import the adapter again"
        )
    return envelope, _checked(envelope, memoryview(head)[ENVELOPE_BYTES:], chunks, key)  # the head may have all of it


def _checked(
    envelope: Envelope, rest: Part, chunks: Iterator[bytes], key: str
) -> Generator[Part | Envelope, None, None]:
    digest, num_bytes = hashlib.sha256(), 0
    rest = rest or next(chunks, b"")
    while rest:
        num_bytes += len(rest)
        if num_bytes > envelope.content_bytes:
            break  # longer than claimed, so the rest does not matter
        digest.update(rest)
        yield rest
        rest = next(chunks, b"")
    if num_bytes != envelope.content_bytes or digest.hexdigest() != envelope.content_sha256:
        more = "more than " if num_bytes > envelope.content_bytes else ""
        found = f"{more}{envelope.content_bytes}" if more else str(num_bytes)
        raise StoreCorrupt(
            f"{key} should have {envelope.content_bytes} bytes of SHA-256 {envelope.content_sha256}, but has {found} "
            f"bytes of SHA-256 {digest.hexdigest()}; run the store's fsck with repair and import the adapter again"
        )
    yield envelope
