"""Packed revisions: one file per adapter, loaded by a memory map and a few large copies."""

from adapters.packed.engine_directory import (
    PACKED_NAME,
    kept_directory,
    scale_packed,
    write_engine_config,
    write_for_engine,
)
from adapters.packed.metadata import PackedMetadata
from adapters.packed.reader import PackedRevision, announced_sha256, read_packed
from adapters.packed.writer import write_packed

__all__ = [
    "PACKED_NAME",
    "PackedMetadata",
    "PackedRevision",
    "announced_sha256",
    "kept_directory",
    "read_packed",
    "scale_packed",
    "write_engine_config",
    "write_for_engine",
    "write_packed",
]
