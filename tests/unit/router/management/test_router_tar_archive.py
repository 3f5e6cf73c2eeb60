"""Archives that are made while they are read."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from datetime import UTC, datetime
from pathlib import Path

from router.management.tar_archive import TarArchive

MADE_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_it_holds_the_files_though_their_directory_is_gone(tmp_path: Path) -> None:
    contents = {f"of-{size}": os.urandom(size) for size in (0, 1, 511, 512, 513, 256 * 1024, 256 * 1024 + 1, 10**6)}
    directory = tmp_path / "directory"
    directory.mkdir()
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    archive = TarArchive(directory, "bot-r1", MADE_AT)
    shutil.rmtree(directory)
    pieces = list(archive.pieces())
    assert max(map(len, pieces)) == 256 * 1024
    data = b"".join(pieces)
    assert len(data) == archive.num_bytes
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        members = opened.getmembers()
        assert [member.name for member in members] == sorted(f"bot-r1/{name}" for name in contents)
        for member in members:
            extracted = opened.extractfile(member)
            assert extracted is not None
            assert extracted.read() == contents[member.name.removeprefix("bot-r1/")]
            assert (member.mtime, member.mode) == (MADE_AT.timestamp(), 0o644)
    archive.close()


def test_a_file_is_beyond_what_old_headers_say(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(9 * 1024**3)  # a hole
    archive = TarArchive(tmp_path, "bot-r1", MADE_AT)
    head = next(archive.pieces())
    with tarfile.open(fileobj=io.BytesIO(head)) as opened:
        member = opened.next()
    assert member is not None
    assert member.size == 9 * 1024**3
    assert archive.num_bytes == len(head) + 9 * 1024**3 + 1024
    archive.close()


def test_closed_files_are_open_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = set(os.listdir("/proc/self/fd"))
    archive = TarArchive(tmp_path, "bot-r1", MADE_AT)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    archive.close()
    archive.close()
    assert set(os.listdir("/proc/self/fd")) <= before
