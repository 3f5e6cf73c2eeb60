"""Export a packed revision as a directory in Prelude's own layout (docs/adapter-formats.md), which can be imported.

The packed form has the serving dtype, with scales folded in, and so has the export: its scales are 1, its values have
the serving dtype's precision. It computes what workers compute, bit for bit. It is the same revision only if the source
had that dtype and scale.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.files.durable import new_folder
from adapters.formats.prelude import CONFIG_NAME, WEIGHTS_STEM
from adapters.formats.safetensors_file import Encoded, write_safetensors
from adapters.model.manifest import Manifest
from adapters.model.number_ranges import numbers_in
from adapters.packed import PackedRevision
from adapters.packed.fused_layout import EXPERT_PARTS_OF, PARTS_OF
from adapters.packed.metadata import DTYPE_CODES


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
    for name, module in metadata.modules.items():
        places = [str(layer) for layer in module.layers]
        found |= _parts(packed, name, PARTS_OF[name], module.part_rows, metadata.lora_rank, places, ranks)
    if metadata.experts is not None:
        ranks = {
            f"{entry.layer}.experts.{expert}.{entry.module}": entry.rank
            for entry in manifest.experts
            for expert in numbers_in(entry.experts)
        }
        for name, of_experts in metadata.experts.modules.items():
            layers = zip(of_experts.layers, of_experts.experts, strict=True)
            places = [f"{layer}.experts.{expert}" for layer, own in layers for expert in numbers_in(own)]
            parts, rank = EXPERT_PARTS_OF[name], metadata.experts.rank
            found |= _parts(packed, name, parts, of_experts.part_rows, rank, places, ranks)
    if (reft := metadata.reft) is not None:
        for place, (layer, rank) in enumerate(zip(reft.layers, reft.ranks, strict=True)):
            found[f"reft.{layer}.A"] = packed.tensors["reft.a"][place, :rank]
            found[f"reft.{layer}.B"] = packed.tensors["reft.b"][place, :, :rank].T
            found[f"reft.{layer}.bias"] = packed.tensors["reft.bias"][place, :rank]
    return {name: (DTYPE_CODES[metadata.dtype], array.shape, array) for name, array in found.items()}


def _parts(
    packed: PackedRevision,
    module: str,
    parts: Sequence[str],
    part_rows: Sequence[int],
    padded_rank: int,
    places: Sequence[str],
    ranks: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """The factors in an engine module: of `places` on its first axis and of its parts, those that have a rank."""
    a, b = packed.tensors[f"lora.{module}.a"], packed.tensors[f"lora.{module}.b"]
    found: dict[str, np.ndarray] = {}
    for place, where in enumerate(places):
        first_row = 0
        for number, (part, rows) in enumerate(zip(parts, part_rows, strict=True)):
            if (rank := ranks.get(f"{where}.{part}")) is not None:
                first_rank = number * padded_rank
                found[f"lora.{where}.{part}.A"] = a[place, first_rank : first_rank + rank]
                found[f"lora.{where}.{part}.B"] = b[place, first_row : first_row + rows, :rank]
            first_row += rows
    return found
