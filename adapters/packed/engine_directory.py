"""Write what an engine loads: a directory with a packed revision, at a scale, and SGLang's `adapter_config.json`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from adapters.formats.peft.config import CONFIG_NAME, OUR_KEY
from adapters.formats.safetensors_file import encode
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, widened
from adapters.model.serving import EngineDtype, check_fits
from adapters.packed.fused_layout import ALL_PARTS_OF, PARTS_OF
from adapters.packed.metadata import PackedMetadata
from adapters.packed.reader import read_packed
from adapters.packed.writer import write_packed

PACKED_NAME = "packed.safetensors"


def kept_directory(directory: Path) -> Path:
    """The name that an adapter's directory gets before it is unloaded, if its file shall hold another one next.

    The engine then keeps the file mapped. An agent that deletes it instead takes it from the engine, too.
    """
    return directory.with_name(f"{directory.name}.kept")


def write_for_engine(adapter: Adapter, base: BaseModel, dtype: EngineDtype, directory: Path) -> None:
    """Write an adapter for an engine to `directory`.

    Raises AdapterIncompatible if a value does not fit the dtype or the adapter is for another base model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_packed(adapter, base, dtype, directory / PACKED_NAME)
    write_engine_config(read_packed(directory / PACKED_NAME).metadata, directory)


def scale_packed(path: Path, scale: float) -> None:
    """Multiply the effect of LoRA and of ReFT by `scale`, in place: both end with their B.

    The digest in the header stays that of the revision. Call it before an engine maps the file. Blocking. Raises
    AdapterIncompatible if a value does not fit the dtype any more; the file is then of no use.
    """
    packed = read_packed(path)
    dtype = packed.metadata.dtype
    data = np.memmap(path, np.uint8, "r+")[-packed.num_bytes :]
    begin = 0
    for name, tensor in sorted(packed.tensors.items()):  # in the order of the file
        own = data[begin : begin + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        begin += tensor.nbytes
        if name.endswith(".b"):
            for piece in own:  # of one layer or expert, since float32 takes more memory
                with np.errstate(over="ignore"):
                    scaled = widened(piece) * np.float32(scale)
                check_fits(f"{name} at adapter_scale {scale:g}", scaled, dtype)
                piece[...] = np.frombuffer(encode(scaled, dtype)[2], piece.dtype).reshape(piece.shape)


def write_engine_config(metadata: PackedMetadata, directory: Path, *, is_memory_only: bool = False) -> None:
    """Write the configuration that SGLang reads before the weights. Scales are folded in, so alpha is the rank."""
    # SGLang uses the same names for projections of experts.
    adapted = {part for name, _, _ in metadata.all_modules for part in ALL_PARTS_OF[name]}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": metadata.rank,
        "lora_alpha": metadata.rank,
        "target_modules": [part for parts in PARTS_OF.values() for part in parts if part in adapted],
        "bias": "none",
        OUR_KEY: {  # the engine reads from it how long requests need the adapter
            "revision_id": metadata.revision_id,
            "dtype": metadata.dtype,
            "positions": metadata.positions,
            "memory_only": is_memory_only,
        },
    }
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2))
