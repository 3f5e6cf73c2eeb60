"""Copies a revision between tiers and verifies it during the copy, so each byte is read once. Everything here blocks.

In the store and on the worker's disk a revision is an object: an envelope with its digest, then the packed file. In
host memory it is the packed file alone.
"""

from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from adapters.errors import HostExhausted
from adapters.store import Envelope, StoreCorrupt
from adapters.store.envelope import ENVELOPE_BYTES, Part, content_of
from prefill_worker.residency.threads import Stop

_CHUNK_BYTES = 8 * 1024**2


def chunks_of(path: Path) -> Iterator[bytes]:
    """Read a file in chunks. Raises OSError, FileNotFoundError at the first chunk."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def checked_content(path: Path, revision_id: str) -> Iterator[Part | Envelope]:
    """The content of an object in a file, then its envelope. Raises StoreCorrupt, also if it cannot be read."""
    return content_of(_read(path), str(path), revision_id)


def _read(path: Path) -> Iterator[bytes]:
    try:
        yield from chunks_of(path)
    except OSError as error:
        HostExhausted.check(error)
        raise StoreCorrupt(f"{path} cannot be read ({error.strerror})") from error


def write_content(
    parts: Iterable[Part | Envelope], file: FileIO, num_bytes: int, stop: Stop, *, as_object: bool
) -> Envelope:
    """Write what `content_of` yields to a file, as packed file or as object, and close it. Its old content is lost.

    Raises StoreCorrupt if it yields more than `num_bytes`, OSError, Stopped, and what `parts` raises; the caller then
    deletes the file.
    """
    written, envelope = 0, None
    with file:
        if as_object:
            file.seek(ENVELOPE_BYTES)
        for part in parts:
            stop.check()
            if isinstance(part, Envelope):
                envelope = part
                continue
            written += len(part)
            if written > num_bytes:
                name = Path(str(file.name)).name
                raise StoreCorrupt(f"{name} has more than the {num_bytes} bytes that the store announced; try again")
            write_all(file, part)
        assert envelope is not None  # `content_of` ends with it, or raises
        if as_object:
            write_all(file, envelope.signature)
            file.seek(0)
            file.write(envelope.encode())
        else:
            file.truncate()
    return envelope


def content_in_memory(path: Path, envelope: Envelope) -> Iterator[Part | Envelope]:
    """The content of a packed file in host memory, which was verified when it was loaded."""
    yield from chunks_of(path)
    yield envelope


def write_all(file: FileIO, chunk: Part) -> None:
    """Write a whole chunk: `FileIO.write` may stop short. Raises OSError."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]
