"""Streams the files of a directory as a tar archive, without writing the archive anywhere."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

_PIECE_BYTES = 256 * 1024  # small, because a slow client has a deadline for each piece


class TarArchive:
    """An uncompressed archive. Keeps the files open from the start until `close`, so the directory may be removed."""

    def __init__(self, directory: Path, folder: str, modified_at: datetime) -> None:
        """Archive the files of `directory` below `folder`. Blocking."""
        self._members: list[tuple[bytes, BinaryIO, int]] = []  # header, file, its bytes
        with ExitStack() as opened:
            for path in sorted(directory.iterdir()):
                file = opened.enter_context(path.open("rb"))
                member = tarfile.TarInfo(f"{folder}/{path.name}")
                member.size = os.fstat(file.fileno()).st_size
                member.mtime = int(modified_at.timestamp())
                self._members.append((member.tobuf(), file, member.size))
            self._files = opened.pop_all()

    @property
    def num_bytes(self) -> int:
        """Size of the whole archive."""
        return sum(len(head) + size + _padding(size) for head, _, size in self._members) + len(_END)

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive's bytes, once. Blocking. Raises OSError."""
        for head, file, size in self._members:
            yield head
            while piece := file.read(_PIECE_BYTES):
                yield piece
            yield bytes(_padding(size))
        yield _END

    def close(self) -> None:
        """Close the files, which frees those of a removed directory. Blocking."""
        self._files.close()


_END = bytes(2 * tarfile.BLOCKSIZE)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
