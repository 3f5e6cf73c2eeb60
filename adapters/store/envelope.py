"""The envelope at the start of every stored object, by which the object can be verified alone.

A revision id is a digest of what an adapter computes, not of the file that it is packed in, so it cannot show that the
file is intact. The envelope can:

    16 bytes  "prelude-object-1", or "prelude-object-2" with a signature
    32 bytes  the revision id's digest
    32 bytes  SHA-256 of the content
     8 bytes  size of the content, little-endian

The content follows it, and then the signature (`adapters/store/signing.py`), which shows who wrote all this.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from adapters.files.digest import Digest, Part
from adapters.store.errors import StoreCorrupt
from adapters.store.layout import digits_of

ENVELOPE_BYTES = 88
SIGNATURE_BYTES = 64
_MAGIC = b"prelude-object-1"
_SIGNED_MAGIC = b"prelude-object-2"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The identity, digest and size of one object's content."""

    revision_id: str
    content_sha256: str  # 64 hex digits
    content_bytes: int
    signature: bytes = b""  # SIGNATURE_BYTES, or empty: nobody signed it

    @property
    def object_bytes(self) -> int:
        """Size of the whole object."""
        return ENVELOPE_BYTES + self.content_bytes + len(self.signature)

    @property
    def statement(self) -> bytes:
        """What is signed."""
        return replace(self, signature=b"").encode()

    def encode(self) -> bytes:
        """The object's first ENVELOPE_BYTES. A signature follows the content."""
        return b"".join(
            (
                _SIGNED_MAGIC if self.signature else _MAGIC,
                bytes.fromhex(digits_of(self.revision_id)),
                bytes.fromhex(self.content_sha256),
                self.content_bytes.to_bytes(8, "little"),
            )
        )

    @classmethod
    def decode(cls, head: bytes, key: str) -> Self:
        """Parse an object's first bytes; a signature is then all zeros. Raises StoreCorrupt."""
        if len(head) < ENVELOPE_BYTES or not head.startswith((_MAGIC, _SIGNED_MAGIC)):
            raise StoreCorrupt(
                f"{key} begins with {head[: len(_MAGIC)]!r} and not with the {ENVELOPE_BYTES} bytes of an envelope "
                f"({_MAGIC!r} …); run the store's fsck with repair and import the adapter again"
            )
        return cls(
            revision_id=f"sha256:{head[16:48].hex()}",
            content_sha256=head[48:80].hex(),
            content_bytes=int.from_bytes(head[80:88], "little"),
            signature=bytes(SIGNATURE_BYTES) if head.startswith(_SIGNED_MAGIC) else b"",
        )


def object_bytes(head: bytes) -> int:
    """The object's size as its first bytes claim it; 0 if they are no envelope."""
    try:
        return Envelope.decode(head, "").object_bytes
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
    num_bytes, signature = 0, b""
    most = len(envelope.signature)
    rest = rest or next(chunks, b"")
    with Digest() as digest:
        while rest:
            part = rest[: envelope.content_bytes - num_bytes]
            signature += bytes(rest[len(part) :][: most + 1])
            if len(signature) > most:
                break  # longer than claimed, so the rest does not matter
            if part:
                num_bytes += len(part)
                digest.update(part, is_all=len(part) == envelope.content_bytes)
                yield part
            rest = next(chunks, b"")
        found_sha256 = digest.hexdigest()
    is_whole = num_bytes == envelope.content_bytes and len(signature) == most
    if not is_whole or found_sha256 != envelope.content_sha256:
        more = "more than " if len(signature) > most else ""
        found = f"{more}{num_bytes}"
        raise StoreCorrupt(
            f"{key} should have {envelope.content_bytes} bytes of SHA-256 {envelope.content_sha256}, but has {found} "
            f"bytes of SHA-256 {found_sha256}; run the store's fsck with repair and import the adapter again"
        )
    yield replace(envelope, signature=signature)
