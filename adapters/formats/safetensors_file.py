"""Read and write safetensors files in numpy; every claim of a header is checked before it is used.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes, which
must fill the rest without overlap or gap. Bytes are read with pread, not mapped, so that a file that is truncated
meanwhile causes an error, not a SIGBUS.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.errors import AdapterMalformed, AdapterTooLarge, AdapterUnsupported
from adapters.files.digest import Digest
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import is_integer, parse_object
from adapters.model.normal_form import FloatArray, widened

# A LoRA on 128 experts in 48 layers has 36,864 tensors and six million bytes of header; allow more than twice that.
MAX_HEADER_BYTES = 16 * 1024**2
_MAX_DIMENSIONS = 8
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CODES = {dtype: code for code, dtype in _FLOATS.items()}
STORAGE_DTYPES: dict[str, str] = {
    "float32": "<f4",
    "bfloat16": "<u2",
    "float16": "<f2",
}  # numpy's, bfloat16 as its bits
Encoded = tuple[str, tuple[int, ...], bytes | np.ndarray]  # dtype code, shape, and bytes or an array in the dtype


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The checked header entry of one tensor."""

    code: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file
    end: int


class SafetensorsFile:
    """An open file whose header has been checked. Valid only inside `open_safetensors`."""

    def __init__(self, name: str, num_bytes: int, descriptor: int, tensors: Mapping[str, TensorInfo]):
        self.name = name
        self.num_bytes = num_bytes
        self.tensors = tensors
        self._descriptor = descriptor

    def common_dtype(self, tensors: Iterable[str]) -> str:
        """The narrowest dtype that holds the values of all of them exactly."""
        dtypes = {self.dtype_of(tensor) for tensor in tensors}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self.tensors[tensor].shape

    def dtype_of(self, tensor: str) -> str:
        """ "float32", "bfloat16" or "float16". Raises AdapterUnsupported for every other type."""
        code = self.tensors[tensor].code
        if code not in _FLOATS:
            raise AdapterUnsupported(
                f"{self.name}: tensor {tensor!r} has dtype {code}; save adapters as {', '.join(_FLOATS)} "
                "(quantised adapters are not served)"
            )
        return _FLOATS[code]

    def read(self, tensor: str) -> FloatArray:
        """The tensor's values as float32. Raises AdapterMalformed if one of them is NaN or infinite."""
        return self._read(tensor)[1]

    def read_stored(self, tensor: str) -> np.ndarray:
        """As `read`, but in the file's dtype, bfloat16 as its bits (uint16). Read-only."""
        return self._read(tensor)[0]

    def _read(self, tensor: str) -> tuple[np.ndarray, FloatArray]:
        dtype, info = self.dtype_of(tensor), self.tensors[tensor]
        raw = np.empty(info.shape, dtype=STORAGE_DTYPES[dtype])
        self._fill(raw, info.begin, tensor)
        raw.flags.writeable = False
        values = widened(raw)
        if not np.isfinite(values).all():
            bad = np.argwhere(~np.isfinite(values))[0].tolist()
            raise AdapterMalformed(
                f"{self.name}: tensor {tensor!r} has {values[tuple(bad)]} at {bad}; every value must be finite"
            )
        return raw, values

    def _fill(self, array: np.ndarray, begin: int, tensor: str) -> None:
        view, done = array.reshape(-1).view(np.uint8).data, 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], begin + done)
            if count == 0:
                raise AdapterMalformed(f"{self.name} ended inside tensor {tensor!r}; it changed while it was read")
            done += count


@contextmanager
def open_safetensors(folder: AdapterFolder, name: str) -> Iterator[SafetensorsFile]:
    """Open a file of the folder and check its size, then its header. If it is missing, say what is there instead."""
    if name not in folder.names:
        if f"{name}.index.json" in folder.names:
            raise AdapterUnsupported(f"{folder.directory} has its weights in several files; save them as one {name}")
        if pickles := sorted(each for each in folder.names if each.endswith(_PICKLE_SUFFIXES)):
            raise AdapterUnsupported(
                f"{folder.directory} has its weights in {pickles[0]}, a pickle, which can run code when it is read; "
                "save it as safetensors: load it with peft and call save_pretrained"
            )
        raise AdapterMalformed(f"{folder.directory} has no {name}; the adapter's weights are missing")
    with folder.open(name) as (descriptor, num_bytes):
        if num_bytes > (most := folder.limits.max_bytes):
            raise AdapterTooLarge(
                f"{name!r} in {folder.directory} has {num_bytes} bytes; at most {most} are accepted: train with a "
                "lower rank, save in 16 bits, or raise adapter_limits.max_bytes"
            )
        yield SafetensorsFile(name, num_bytes, descriptor, _read_header(name, descriptor, num_bytes))


def _read_header(name: str, descriptor: int, num_bytes: int) -> dict[str, TensorInfo]:
    def wrong(what: str) -> AdapterMalformed:
        return AdapterMalformed(f"{name} is not a sound safetensors file: {what}; save or download it again")

    prefix = os.pread(descriptor, 8, 0)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_bytes > num_bytes - 8:
        raise wrong(f"it has {num_bytes} bytes, too few for its header")
    if header_bytes > MAX_HEADER_BYTES:
        raise wrong(f"its header claims {header_bytes} bytes; it may have {MAX_HEADER_BYTES}")
    text = os.pread(descriptor, header_bytes, 8)
    if len(text) < header_bytes or not text.startswith(b"{"):
        raise wrong("its header is not a JSON object")
    header = parse_object(text, f"the header of {name}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise wrong("__metadata__ does not map strings to strings")
    tensors = {tensor: _info(tensor, entry, 8 + header_bytes, num_bytes, wrong) for tensor, entry in header.items()}
    expected = 8 + header_bytes
    for tensor, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != expected:
            raise wrong(
                f"the bytes of tensor {tensor!r} {'overlap others' if info.begin < expected else 'follow a hole'}"
            )
        expected = info.end
    if expected != num_bytes:
        raise wrong(f"its tensors end at byte {expected}, but it has {num_bytes} bytes")
    return tensors


def _info(tensor: str, entry: Any, start: int, num_bytes: int, wrong: Any) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong(f"the entry of tensor {tensor[:100]!r} must have exactly dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _ITEM_BYTES:
        raise wrong(f"tensor {tensor!r} has the unknown dtype {str(code)[:40]!r}")
    for values, length in ((shape, None), (offsets, 2)):
        if (
            not isinstance(values, list)
            or len(values) > _MAX_DIMENSIONS
            or (length is not None and len(values) != length)
            or not all(is_integer(value) and 0 <= value < 1 << 48 for value in values)
        ):
            raise wrong(f"tensor {tensor!r} has the shape {str(shape)[:60]} and offsets {str(offsets)[:60]}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEM_BYTES[code]:
        raise wrong(f"tensor {tensor!r} of {code} {shape} cannot have {end - begin} bytes")
    if start + end > num_bytes:
        raise wrong(f"tensor {tensor!r} ends at byte {start + end}, but the file has {num_bytes} bytes")
    return TensorInfo(code, tuple(shape), start + begin, start + end)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round finite values to nearest, ties to even. The result holds the bits as uint16."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def encode(values: np.ndarray, dtype: str) -> tuple[str, tuple[int, ...], bytes]:
    """Encode an array in a file's dtype: (dtype code, shape, bytes)."""
    array = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "bfloat16":
        stored = float32_to_bfloat16(array)
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            stored = array.astype("<f2")
    else:
        stored = array
    return _CODES[dtype], values.shape, stored.tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, Encoded], metadata: Mapping[str, str] | None = None) -> None:
    """Write encoded tensors in the order of their names, and fsync."""
    sizes = {
        name: (code, shape, len(data) if isinstance(data, bytes) else data.nbytes)
        for name, (code, shape, data) in tensors.items()
    }
    with path.open("wb") as file:
        file.write(header_of(sizes, metadata))
        for _, (_, _, data) in sorted(tensors.items()):
            file.write(data if isinstance(data, bytes) else bytes_of(data))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor whose values are produced while it is written, anew at each call of `pieces`."""

    shape: tuple[int, ...]
    storage: str  # numpy's dtype
    pieces: Callable[[], Iterator[np.ndarray]]  # the values, piece by piece in C order

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.storage).itemsize


def write_streamed(
    path: Path, code: str, tensors: Mapping[str, StreamedTensor], metadata_with: Callable[[str], Mapping[str, str]]
) -> None:
    """Write tensors of one dtype in the order of their names, and fsync.

    `metadata_with` makes the metadata from the SHA-256 of the tensors' bytes, 64 hex digits. Its size must not depend
    on the digest, because the header is written before the digest is known.
    """
    sizes = {name: (code, tensor.shape, tensor.num_bytes) for name, tensor in tensors.items()}
    with Digest() as digest, path.open("wb") as file:
        file.write(provisional := header_of(sizes, metadata_with("0" * 64)))
        for _, tensor in sorted(tensors.items()):
            for piece in tensor.pieces():
                data = bytes_of(piece)
                digest.update(data)
                file.write(data)
        header = header_of(sizes, metadata_with(digest.hexdigest()))
        assert len(header) == len(provisional)
        assert file.tell() == len(header) + sum(tensor.num_bytes for tensor in tensors.values())
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str] | None) -> bytes:
    """Everything before the tensors' bytes. `tensors`: name -> (dtype code, shape, number of bytes)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (code, shape, num_bytes) in sorted(tensors.items()):
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(array: np.ndarray) -> memoryview:
    """An array's bytes in C order, copied only if it is in another order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
