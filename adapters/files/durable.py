"""Durable files and folders: fsync of a file does not save the directory entry that names it."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably. An existing one is fine."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync(folder.parent)


def fsync(path: Path) -> None:
    """Flush a file's content to the disk, also what others wrote to it, or a folder's directory entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which becomes `path` with the block: complete, or not at all.

    The block flushes the file's content. A killed process may leave a `.<name>.<uuid>`.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, which becomes the new folder `path` with the block: complete, or not at all.

    The block flushes the files' content. Raises FileExistsError.
    """
    exists = f"{path} exists; name a directory that does not"
    if os.path.lexists(path):
        raise FileExistsError(exists)
    make_folder(path.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        fsync(temporary)
        try:
            temporary.rename(path)
        except OSError as error:  # another process has created it meanwhile
            raise FileExistsError(exists) from error
        fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
