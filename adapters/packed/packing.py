"""From an adapter's directory to its packed file: read, look at what the file will take, write."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterTooLarge
from adapters.formats import Limits, read_adapter
from adapters.formats.positions import GivenPositions
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest, revision_id_of, revision_id_of_packed
from adapters.model.serving import EngineDtype
from adapters.packed.engine_directory import PACKED_NAME
from adapters.packed.reader import read_packed
from adapters.packed.writer import packed_bytes_of, write_packed
from adapters.store.errors import StoreFull, disk_full_at


@dataclass(frozen=True, slots=True)
class PackedSize:
    """What is known of a packed file before a byte of it is written."""

    revision_id: str
    manifest: Manifest
    num_bytes: int
    warnings: tuple[str, ...]  # about the adapter's files


BeforeWriting = Callable[[PackedSize], None]  # what it raises ends the packing


# Packs the adapter in a directory into a new file, to be applied to these positions; None: to its own. Raises what
# `read_adapter` raises, AdapterTooLarge if the file would exceed `limits.max_bytes`, and StoreFull.
Packer = Callable[[Path, Path, BaseModel, Limits, EngineDtype, BeforeWriting, GivenPositions | None], PackedSize]


def pack_directory(
    directory: Path,
    target: Path,
    base: BaseModel,
    limits: Limits,
    dtype: EngineDtype,
    before_writing: BeforeWriting,
    positions: GivenPositions | None = None,
) -> PackedSize:
    """A `Packer` that works in this process: for directories of whoever runs it."""
    adapter = read_adapter(directory, base, limits, positions)
    num_bytes = packed_bytes_of(adapter, base, dtype)
    size = PackedSize(revision_id_of(adapter), Manifest.of(adapter), num_bytes, adapter.warnings)
    if size.num_bytes > limits.max_bytes:
        raise AdapterTooLarge(
            f"packed for engines the adapter has {size.num_bytes} bytes, and at most {limits.max_bytes} are accepted. "
            f"All its modules are padded to the largest rank, {adapter.max_rank}: train all with one lower rank, or "
            "have adapter_limits.max_bytes raised"
        )
    before_writing(size)
    with disk_full_at(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        filesystem = os.statvfs(target.parent)
        if size.num_bytes > (free := filesystem.f_bavail * filesystem.f_frsize):
            raise StoreFull(
                f"there is no room for an adapter at {target}: it has {size.num_bytes} bytes packed, and {free} are "
                "free; free or add disk space"
            )
        write_packed(adapter, base, dtype, target)
    return size


def take_packed(
    directory: Path,
    target: Path,
    base: BaseModel,
    limits: Limits,
    dtype: EngineDtype,
    before_writing: BeforeWriting,
    positions: GivenPositions | None = None,
    *,
    is_carried: bool = True,
) -> PackedSize:
    """A `Packer` of a trainer's directory, which has a packed file: `target` is that file, copied only to another disk.

    What has been carried from another place is read, too. Raises AdapterMissing, AdapterMalformed, also for a file that
    is not what it says, AdapterIncompatible for another model or dtype, AdapterTooLarge, StoreFull.
    """
    source = directory / PACKED_NAME
    packed = read_packed(source)
    packed.check_fits(base)
    if packed.metadata.dtype != dtype:
        raise AdapterIncompatible(f"the trainer has packed for {packed.metadata.dtype}, and engines serve {dtype}")
    if (num_bytes := source.stat().st_size) > limits.max_bytes:
        raise AdapterTooLarge(
            f"packed for engines the adapter has {num_bytes} bytes, and at most {limits.max_bytes} are accepted"
        )
    metadata = packed.metadata
    if metadata.revision_id != revision_id_of_packed(metadata.manifest, metadata.tensors_sha256):
        raise AdapterMalformed(  # else it would answer for whichever tenant has that revision
            f"the trainer's file says {metadata.revision_id}, which is not that of its manifest and "
            "tensors; save them again"
        )
    if is_carried:
        packed.check_digest()
    manifest = Manifest.from_json(metadata.manifest)
    before_writing(size := PackedSize(metadata.revision_id, manifest, num_bytes, ()))
    with disk_full_at(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
    return size
