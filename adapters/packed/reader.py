"""Map packed files; nothing in a file is used before it is checked."""

import hashlib
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterMissing, HostExhausted
from adapters.files.digest import sha256_of_chunks
from adapters.formats.json_file import is_integer, parse_object
from adapters.formats.safetensors_file import STORAGE_DTYPES
from adapters.model.base_model import BaseModel
from adapters.packed.fused_layout import part_shapes
from adapters.packed.metadata import CHUNKED, DTYPE_CODES, MAX_HEADER_BYTES, PackedMetadata, PackedModule


@dataclass(frozen=True, slots=True, eq=False)
class PackedRevision:
    """An adapter in the layout of the engine's buffers.

    The arrays are read-only views of the file, which stays mapped as long as any of them lives. bfloat16 is given as
    its bits, uint16. The first axis, L', is over the layers of a module, which its metadata lists:

        lora.<module>.a  [L', parts * rank, in]     lora.<module>.b  [L', out, rank]
        reft.a  [L', rank, hidden]     reft.b  [L', hidden, rank]     reft.bias  [L', rank]

    For experts the first axis, N, is over the layers of a module and, within each, its adapted experts, which the
    metadata lists; the rank is that of the experts.

        lora.<module>_moe.a  [N, parts * rank, in]     lora.<module>_moe.b  [N, out, rank]
    """

    path: Path
    metadata: PackedMetadata
    tensors: Mapping[str, np.ndarray]
    data: memoryview  # all the tensors' bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return len(self.data)

    def check_digest(self) -> None:
        """Read all tensors. Raises AdapterMalformed unless they have the digest that they were packed with."""
        if self.metadata.format == CHUNKED:
            found = sha256_of_chunks(self.data)
        else:
            found = hashlib.sha256(self.data).hexdigest()
        if found != self.metadata.tensors_sha256:
            raise AdapterMalformed(
                f"the tensors of {self.path} have the SHA-256 {found}, not "
                f"{self.metadata.tensors_sha256} as its header says; delete it and fetch it again"
            )

    def check_fits(self, base: BaseModel) -> None:
        """Raise AdapterIncompatible for another base model, AdapterMalformed for sizes that it does not have."""
        if self.metadata.base_fingerprint != base.fingerprint:
            raise AdapterIncompatible(
                f"{self.metadata.revision_id} was packed for the base model {self.metadata.base_fingerprint}, this one "
                f"is {base.fingerprint}; import an adapter that was trained for this one"
            )
        layers = [layer for _, module, _ in self.metadata.all_modules for layer in module.layers]
        layers += self.metadata.reft.layers if self.metadata.reft else ()
        wrong = [f"layer {max(layers)}"] if max(layers) >= base.num_layers else []
        for name, module, _ in self.metadata.all_modules:
            wrong += _misfits(name, module, self.tensors[f"lora.{name}.a"].shape[2], base)
        if self.metadata.reft and self.tensors["reft.a"].shape[2] != base.hidden:
            wrong.append(f"ReFT of {self.tensors['reft.a'].shape[2]} columns")
        if wrong:
            revision_id = self.metadata.revision_id
            raise AdapterMalformed(
                f"{revision_id} has {', '.join(wrong)}, which {base} has not; pack the adapter again"
            )


def _misfits(name: str, module: PackedModule, size_in: int, base: BaseModel) -> list[str]:
    """The parts of an engine module that the base model does not have."""
    wrong = []
    if module.experts is not None:
        if base.experts is None:
            return [name]
        wrong += [f"experts in layer {layer}" for layer in module.layers if not base.has_experts(layer)][:1]
        if (last := max(ranges[-1][1] for ranges in module.experts)) >= base.experts.count:
            wrong.append(f"expert {last}")
    shapes = part_shapes(base, name)
    if list(module.part_rows) != [rows for rows, _ in shapes]:
        wrong.append(f"{name} with B of {module.part_rows} rows")
    if size_in != shapes[0][1]:
        wrong.append(f"{name} with A of {size_in} columns")
    return wrong


def read_packed(path: Path) -> PackedRevision:
    """Map a packed file and check its header, but not its tensors (see `PackedRevision.check_digest`).

    The file must not be modified or truncated while it is mapped; replacing or deleting it is fine. Raises
    AdapterMissing if it cannot be opened, AdapterMalformed if it contradicts itself.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        HostExhausted.check(error)
        raise AdapterMissing(f"{path} cannot be read ({error.strerror}); fetch the revision again") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterMalformed(f"{path} is not a regular file; delete it and fetch the revision again")
        header, data_begin = _header(path, descriptor, status.st_size)
        metadata = _metadata(path, header)
        shapes = _shapes(path, header, metadata, status.st_size - data_begin)
        mapped = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    storage, tensors, begin = np.dtype(STORAGE_DTYPES[metadata.dtype]), {}, data_begin
    for name, shape in shapes.items():
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = np.frombuffer(mapped, storage, count, begin).reshape(shape)
        begin += count * storage.itemsize
    return PackedRevision(path, metadata, tensors, memoryview(mapped)[data_begin:])


def announced_sha256(path: Path) -> str:
    """The digest by which a worker knows a file that it is sent. Blocking.

    Of a file with a digest of chunks it is that of the header alone, since the header has the digest of the rest:
    `check_digest` is for that. Of any other it is that of the whole file. Raises OSError.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        header = file.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))
        if f'"format":"{CHUNKED}"'.encode() in header:
            return hashlib.sha256(prefix + header).hexdigest()
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wrong(path: Path, what: str) -> AdapterMalformed:
    return AdapterMalformed(f"{path} is not a sound packed adapter: {what}; delete it and fetch the revision again")


def _header(path: Path, descriptor: int, num_bytes: int) -> tuple[dict[str, Any], int]:
    """(the header, the offset of the tensors)."""
    prefix = os.pread(descriptor, 8, 0)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_bytes > min(num_bytes, MAX_HEADER_BYTES) - 8 or header_bytes % 8:
        raise _wrong(path, f"it has {num_bytes} bytes and claims a header of {header_bytes}")
    text = os.pread(descriptor, header_bytes, 8)
    if len(text) < header_bytes:
        raise _wrong(path, "it ended inside its header")
    return parse_object(text, f"the header of {path}"), 8 + header_bytes


def _metadata(path: Path, header: dict[str, Any]) -> PackedMetadata:
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise _wrong(path, "its header has no __metadata__")
    return PackedMetadata.from_header(metadata, str(path))


def _shapes(
    path: Path, header: dict[str, Any], metadata: PackedMetadata, data_bytes: int
) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes in the order of their bytes: exactly those that the metadata implies, without gaps."""
    expected = _expected_shapes(path, header, metadata)
    if header.keys() != expected.keys():
        odd = sorted(header.keys() ^ expected.keys())
        raise _wrong(path, f"it lacks or should not have the tensors {', '.join(odd)[:200]}")
    code, item_bytes = DTYPE_CODES[metadata.dtype], np.dtype(STORAGE_DTYPES[metadata.dtype]).itemsize
    shapes, begin = {}, 0
    for name in sorted(expected):
        shape = expected[name]
        end = begin + item_bytes
        for size in shape:
            end = begin + (end - begin) * size
        entry = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        if header[name] != entry:
            raise _wrong(path, f"tensor {name!r} is {str(header[name])[:120]}, not {entry}")
        shapes[name], begin = shape, end
    if begin != data_bytes:
        raise _wrong(path, f"its tensors have {begin} bytes, but {data_bytes} follow the header")
    return shapes


def _expected_shapes(path: Path, header: dict[str, Any], metadata: PackedMetadata) -> dict[str, tuple[int, ...]]:
    """The shapes that the metadata implies. Only sizes of inputs and of the hidden state come from the tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module, rank in metadata.all_modules:
        size_in = _last_size(path, header, f"lora.{name}.a")
        shapes[f"lora.{name}.a"] = (module.count, len(module.part_rows) * rank, size_in)
        shapes[f"lora.{name}.b"] = (module.count, sum(module.part_rows), rank)
    if (reft := metadata.reft) is not None:
        hidden = _last_size(path, header, "reft.a")
        shapes["reft.a"] = (len(reft.layers), reft.rank, hidden)
        shapes["reft.b"] = (len(reft.layers), hidden, reft.rank)
        shapes["reft.bias"] = (len(reft.layers), reft.rank)
    return shapes


def _last_size(path: Path, header: dict[str, Any], tensor: str) -> int:
    entry = header.get(tensor)
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not shape or not is_integer(shape[-1]) or not 0 < shape[-1] < 1 << 31:
        raise _wrong(path, f"tensor {tensor!r} is {'missing' if entry is None else str(entry)[:120]}")
    return shape[-1]
