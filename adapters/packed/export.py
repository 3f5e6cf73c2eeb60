"""Export a packed revision as a directory in Prelude's own layout (docs/adapter-formats.md), which can be imported.

The packed form has the serving dtype, with scales folded in, and so has the export: its scales are 1, its values have
the serving dtype's precision. It computes what workers compute, bit for bit. It is the same revision only if the source
was a directory with that dtype and scale.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.files.durable import new_folder
from adapters.formats.prelude import CONFIG_NAME, WEIGHTS_STEM
from adapters.formats.safetensors_file import Encoded, write_safetensors
from adapters.model.manifest import Manifest
from adapters.model.number_ranges import numbers_in
from adapters.packed import PackedRevision
from adapters.packed.fused_layout import ALL_PARTS_OF
from adapters.packed.metadata import DTYPE_CODES, PackedModule


def export_packed(packed: PackedRevision, directory: Path) -> None:
    """Write the revision to the new directory `directory`, complete or not at all. Raises FileExistsError."""
    with new_folder(directory) as folder:
        write_safetensors(folder / f"{WEIGHTS_STEM}.safetensors", _tensors(packed), {"format": "pt"})
        with (folder / CONFIG_NAME).open("w") as file:
            json.dump(_config(packed), file, indent=2)
            file.flush()
            os.fsync(file.fileno())


def _config(packed: PackedRevision) -> dict[str, Any]:
    metadata = packed.metadata
    config: dict[str, Any] = {
        "format": "prelude-adapter-1",
        "base_model": metadata.base_fingerprint,
        "positions": metadata.positions,
    }
    if (trained := Manifest.from_json(metadata.manifest).trained_positions) is not None:
        config["trained_positions"] = trained
    if metadata.modules or metadata.experts:
        config["lora"] = {"scale": 1.0}
    if metadata.reft is not None:
        config["reft"] = {"kind": "direft", "scale": 1.0}
    return config


def _tensors(packed: PackedRevision) -> dict[str, Encoded]:
    """Every factor with its own rank, without projections that the packed form has as zero padding only.

    They are views of the packed file: gigabytes of experts are not in memory twice.
    """
    metadata, manifest = packed.metadata, Manifest.from_json(packed.metadata.manifest)
    found: dict[str, np.ndarray] = {}
    ranks = {f"{entry.layer}.{entry.module}": entry.rank for entry in manifest.lora}
    for entry in manifest.experts:
        of_experts = (f"{entry.layer}.experts.{expert}.{entry.module}" for expert in numbers_in(entry.experts))
        ranks |= dict.fromkeys(of_experts, entry.rank)
    for name, module, rank in metadata.all_modules:
        found |= _parts(packed, name, module, rank, ranks)
    if (reft := metadata.reft) is not None:
        for place, (layer, rank) in enumerate(zip(reft.layers, reft.ranks, strict=True)):
            found[f"reft.{layer}.A"] = packed.tensors["reft.a"][place, :rank]
            found[f"reft.{layer}.B"] = packed.tensors["reft.b"][place, :, :rank].T
            found[f"reft.{layer}.bias"] = packed.tensors["reft.bias"][place, :rank]
    return {name: (DTYPE_CODES[metadata.dtype], array.shape, array) for name, array in found.items()}


def _parts(
    packed: PackedRevision, name: str, module: PackedModule, padded_rank: int, ranks: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """The factors in an engine module: of its places and parts, those that have a rank."""
    a, b = packed.tensors[f"lora.{name}.a"], packed.tensors[f"lora.{name}.b"]
    found: dict[str, np.ndarray] = {}
    for place, numbers in enumerate(module.places):
        where, first_row = ".experts.".join(map(str, numbers)), 0
        for number, (part, rows) in enumerate(zip(ALL_PARTS_OF[name], module.part_rows, strict=True)):
            if (rank := ranks.get(f"{where}.{part}")) is not None:
                first_rank = number * padded_rank
                found[f"lora.{where}.{part}.A"] = a[place, first_rank : first_rank + rank]
                found[f"lora.{where}.{part}.B"] = b[place, first_row : first_row + rows, :rank]
            first_row += rows
    return found
