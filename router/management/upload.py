"""An adapter's files as they arrive: multipart/form-data, written to a folder meanwhile, never whole in memory."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.files.work_folder import WorkFolder
from adapters.store.errors import StoreFull
from router.errors import BodyTooLarge, BodyTooSlow, InvalidField, InvalidUpload
from router.management.thread_work import to_its_end
from router.protocol.request_body import ClientGone

FILE_FIELDS = ("file", "files")
_MAX_FILES = 200
_MAX_FIELD_BYTES = 1024
_WRITE_BYTES = 1024**2  # gathered before they are written
# No separators and no leading dot: a name is a name, never a path. pyreft's names have "#" in them.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.#+=@,()-]{0,199}")
_SUFFIXES = (".safetensors", ".json")


@dataclass(slots=True)
class Upload:
    """What has arrived. The folder, made for the first file, is removed at the end of the block that received it."""

    work_folder: WorkFolder | None = None
    fields: dict[str, str] = field(default_factory=dict)
    file_names: list[str] = field(default_factory=list)
    num_bytes: int = 0  # of the files

    @property
    def folder(self) -> Path:
        assert self.work_folder is not None
        return self.work_folder.path


@asynccontextmanager
async def received_upload(
    headers: Mapping[bytes, bytes],
    receive: Any,
    *,
    fields: tuple[str, ...],
    memory_field: str | None = None,
    max_bytes: int,
    gap_timeout_s: float,
    timeout_s: float,
) -> AsyncIterator[Upload]:
    """The whole upload, for as long as the block lasts. `fields` are those that it may have beside files.

    Where the one called `memory_field`, which must come before the files, is "true", they are in shared memory and are
    written to no disk.

    Raises InvalidUpload, InvalidField, BodyTooLarge, BodyTooSlow, StoreFull and ClientGone. However it ends, nothing
    stays.
    """
    boundary = _boundary_of(headers)
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    upload = Upload()
    try:
        receiver = _Receiver(upload, fields, memory_field)
        try:
            async with asyncio.timeout(timeout_s):
                await _receive(receiver, boundary, receive, max_bytes, gap_timeout_s)
        except TimeoutError:
            raise BodyTooSlow(
                f"the upload was not complete within {timeout_s:g} s, or nothing came for {gap_timeout_s:g} s"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFull("the router has no room for the upload; try again later") from error
            raise
        finally:
            receiver.close()
        if not upload.file_names:
            raise InvalidUpload(f"the upload has no files; send the adapter's files as {FILE_FIELDS[0]!r}")
        yield upload
    finally:
        if upload.work_folder is not None:
            await asyncio.shield(asyncio.to_thread(upload.work_folder.close))


async def _receive(receiver: _Receiver, boundary: bytes, receive: Any, max_bytes: int, gap_timeout_s: float) -> None:
    parser = MultipartParser(boundary, receiver.callbacks)
    num_bytes = 0
    while True:
        async with asyncio.timeout(gap_timeout_s):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        try:
            parser.write(chunk)
            if not message.get("more_body", False):
                parser.finalize()
        except FormParserError as error:
            raise InvalidUpload(f"the body is not sound multipart/form-data: {error}") from None
        is_last = not message.get("more_body", False)
        if is_last or receiver.has_much_to_write:
            await to_its_end(asyncio.to_thread(receiver.write))
        if is_last:
            if not receiver.is_complete:
                raise InvalidUpload("the body ends before its last boundary; send it whole")
            return


class _Receiver:
    """Takes the parser's events. They gather in memory until `write`, which may block."""

    def __init__(self, upload: Upload, fields: tuple[str, ...], memory_field: str | None) -> None:
        self.num_waiting_bytes = 0  # of files
        self.is_complete = False
        self._upload = upload
        self._fields = fields
        self._memory_field = memory_field
        self._waiting: list[tuple[str, bytes]] = []  # file name and what comes next in it
        self._open: tuple[str, BufferedWriter] | None = None
        self._header = (bytearray(), bytearray())  # name and value of the one that is being read
        self._disposition = b""
        self._file_name: str | None = None  # of the part that is being read; None: it is a field
        self._field = ""
        self._value = bytearray()

    @property
    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._part_begins,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_goes_on,
            "on_part_end": self._part_ends,
            "on_end": self._all_ends,
        }

    @property
    def has_much_to_write(self) -> bool:
        """True where bytes have gathered, and for the first file, which shows early whether there is a place for it."""
        return self.num_waiting_bytes >= _WRITE_BYTES or bool(self._waiting and self._upload.work_folder is None)

    def write(self) -> None:
        """Brings what has gathered to the disk, or to where it is kept instead. Blocking."""
        waiting, self._waiting, self.num_waiting_bytes = self._waiting, [], 0
        if waiting and self._upload.work_folder is None:
            in_memory = self._memory_field is not None and self._upload.fields.get(self._memory_field) == "true"
            self._upload.work_folder = WorkFolder("upload", in_memory=in_memory)
        for name, data in waiting:
            if self._open is None or self._open[0] != name:
                self.close()
                self._open = name, (self._upload.folder / name).open("xb")
            self._open[1].write(data)
        if self.is_complete:
            self.close()

    def close(self) -> None:
        if self._open is not None:
            file, self._open = self._open[1], None
            file.close()

    def _part_begins(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _header_ends(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        elif bytes(name).lower() == b"content-transfer-encoding" and bytes(value).lower() not in (b"binary", b"8bit"):
            raise InvalidUpload("content-transfer-encoding is not supported: send the files as they are")
        self._header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidUpload("every part needs a content-disposition of form-data with a name")
        self._field = options[b"name"].decode("utf-8", "replace")
        if b"filename" not in options:
            self._file_name = None
            if self._field not in self._fields:
                known = ", ".join(self._fields)
                raise InvalidField(
                    f"{_shown(self._field)} is not a field of this upload; it has {known}, and files as "
                    f"{FILE_FIELDS[0]!r}",
                    param=self._field[:64],
                )
            if self._field in self._upload.fields:
                raise InvalidField(f"{self._field} is given twice", param=self._field)
            if self._field == self._memory_field and self._upload.file_names:
                raise InvalidField(
                    f"{self._field} must come before the files, which would be on a disk already", param=self._field
                )
            return
        self._file_name = self._checked_name(options[b"filename"].decode("utf-8", "replace"))
        self._upload.file_names.append(self._file_name)
        self._waiting.append((self._file_name, b""))  # there even if it is empty

    def _checked_name(self, name: str) -> str:
        if self._field not in FILE_FIELDS:
            raise InvalidField(
                f"files are sent as {FILE_FIELDS[0]!r} (found {_shown(self._field)})", param=self._field[:64]
            )
        if not _FILE_NAME.fullmatch(name):
            raise InvalidUpload(f"{_shown(name)} is not a file's name; send it without folders, as the adapter has it")
        if not name.endswith(_SUFFIXES):
            raise InvalidUpload(
                f"{_shown(name)} is not taken: send the adapter's *.json and *.safetensors files only; pickled weights "
                "must be saved as safetensors"
            )
        if name in self._upload.file_names:
            raise InvalidUpload(f"{name} is sent twice")
        if len(self._upload.file_names) >= _MAX_FILES:
            raise InvalidUpload(f"the upload has over {_MAX_FILES} files; no adapter has as many")
        return name

    def _part_goes_on(self, data: bytes, start: int, end: int) -> None:
        if self._file_name is not None:
            self._waiting.append((self._file_name, data[start:end]))
            self.num_waiting_bytes += end - start
            self._upload.num_bytes += end - start
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidField(f"{self._field} has over {_MAX_FIELD_BYTES} bytes", param=self._field)

    def _part_ends(self) -> None:
        if self._file_name is None:
            self._upload.fields[self._field] = self._value.decode("utf-8", "replace")
            if self._field == self._memory_field and self._upload.fields[self._field] not in ("true", "false"):
                raise InvalidField(f"{self._field} must be true or false", param=self._field)

    def _all_ends(self) -> None:
        self.is_complete = True


def _boundary_of(headers: Mapping[bytes, bytes]) -> bytes:
    media_type, options = parse_options_header(headers.get(b"content-type", b"").decode("latin-1"))
    if media_type != b"multipart/form-data":
        found = media_type.decode("latin-1") or "none"
        raise InvalidUpload(f"content-type must be multipart/form-data (found {found})")
    if not 1 <= len(boundary := options.get(b"boundary", b"")) <= 70:
        raise InvalidUpload("the content-type multipart/form-data needs a boundary of 1 to 70 characters")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidUpload("content-encoding is not supported: send the body as it is")
    return boundary


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the upload is larger than {max_bytes} bytes: train with a lower rank, save in 16 bits, or have "
        "adapter_limits.max_bytes raised"
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")
