"""Checks the parts of an upload and writes its files: the handler of the multipart parser's events."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from typing import Any

from python_multipart.multipart import parse_options_header

from adapters.files.work_folder import WorkFolder
from router.errors import InvalidField, InvalidUpload

FILE_FIELDS = ("file", "files")
FOLDER = "folder"  # a field with the files' place instead, from a trainer on the same host
_MAX_FILES = 200
_MAX_FIELD_BYTES = 1024
_MAX_HEADER_BYTES = 8 * 1024  # of one header of a part; newer releases of the parser have a bound, too
_WRITE_BYTES = 1024**2  # buffered before a write
# No separators and no leading dot, so no name is a path.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@,()-]{0,199}")
_SUFFIXES = (".safetensors", ".json")


@dataclass(slots=True)
class Upload:
    """The received fields and files. The work folder is created for the first file; `received_upload` removes it."""

    work_folder: WorkFolder | None = None
    fields: dict[str, str] = field(default_factory=dict)
    file_names: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.fields[FOLDER]) if self.work_folder is None else self.work_folder.path


class UploadReceiver:
    """Handles the parser's events. Buffers file data until `write`, which may block."""

    def __init__(
        self,
        upload: Upload,
        fields: tuple[str, ...],
        memory_field: str | None,
        on_field: Callable[[str, str], None] | None = None,
    ) -> None:
        self.num_buffered_bytes = 0  # of files
        self.is_complete = False
        self._upload = upload
        self._fields = fields
        self._memory_field = memory_field
        self._on_field = on_field
        self._buffer: list[tuple[str, bytes]] = []  # file name and its next bytes
        self._open: tuple[str, BufferedWriter] | None = None
        self._header = (bytearray(), bytearray())  # name and value of the current one
        self._disposition = b""
        self._file_name: str | None = None  # of the current part; None: it is a field
        self._field = ""
        self._value = bytearray()

    @property
    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": lambda data, start, end: self._header_part(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._header_part(1, data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    @property
    def should_write(self) -> bool:
        """True if the buffer is full, and for the first file, so that a full disk is noticed early."""
        return self.num_buffered_bytes >= _WRITE_BYTES or bool(self._buffer and self._upload.work_folder is None)

    def write(self) -> None:
        """Write the buffer to the upload's folder. Blocking."""
        buffered, self._buffer, self.num_buffered_bytes = self._buffer, [], 0
        if buffered and self._upload.work_folder is None:
            in_memory = self._memory_field is not None and self._upload.fields.get(self._memory_field) == "true"
            self._upload.work_folder = WorkFolder("upload", in_memory=in_memory)
        for name, data in buffered:
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

    def _part_begin(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _header_part(self, which: int, data: bytes) -> None:
        self._header[which].extend(data)
        if sum(map(len, self._header)) > _MAX_HEADER_BYTES:
            raise InvalidUpload(f"a header of a part has over {_MAX_HEADER_BYTES} bytes")

    def _header_end(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        elif bytes(name).lower() == b"content-transfer-encoding" and bytes(value).lower() not in (b"binary", b"8bit"):
            raise InvalidUpload("content-transfer-encoding is not supported: send the files as they are")
        self._header = (bytearray(), bytearray())

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidUpload("every part needs a content-disposition of form-data with a name")
        self._field = options[b"name"].decode("utf-8", "replace")
        if b"filename" not in options:
            self._file_name = None
            if self._field not in self._fields:
                known = ", ".join(self._fields)
                raise InvalidField(
                    f"{_quoted(self._field)} is not a field of this upload; it has {known}, and files as "
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
        self._buffer.append((self._file_name, b""))  # creates empty files, too

    def _checked_name(self, name: str) -> str:
        if self._field not in FILE_FIELDS:
            raise InvalidField(
                f"files are sent as {FILE_FIELDS[0]!r} (found {_quoted(self._field)})", param=self._field[:64]
            )
        if not _FILE_NAME.fullmatch(name):
            raise InvalidUpload(f"{_quoted(name)} is not a file's name; send it without folders, as the adapter has it")
        if not name.endswith(_SUFFIXES):
            raise InvalidUpload(
                f"{_quoted(name)} is not taken: send the adapter's *.json and *.safetensors files only; pickled "
                "weights must be saved as safetensors"
            )
        if name in self._upload.file_names:
            raise InvalidUpload(f"{name} is sent twice")
        if len(self._upload.file_names) >= _MAX_FILES:
            raise InvalidUpload(f"the upload has over {_MAX_FILES} files; no adapter has as many")
        return name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file_name is not None:
            self._buffer.append((self._file_name, data[start:end]))
            self.num_buffered_bytes += end - start
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidField(f"{self._field} has over {_MAX_FIELD_BYTES} bytes", param=self._field)

    def _part_end(self) -> None:
        if self._file_name is None:
            self._upload.fields[self._field] = self._value.decode("utf-8", "replace")
            if self._field == self._memory_field and self._upload.fields[self._field] not in ("true", "false"):
                raise InvalidField(f"{self._field} must be true or false", param=self._field)
            if self._on_field is not None:
                self._on_field(self._field, self._upload.fields[self._field])

    def _end(self) -> None:
        self.is_complete = True


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")
