"""Export a packed revision as a directory in Prelude's own layout (docs/adapter-formats.md), which can be imported.

The packed form has the serving dtype, with scales folded in, and so has the export: its scales are 1, its values have
the serving dtype's precision. It computes what workers compute, bit for bit. It is the same revision only if the source
had that dtype and scale.
"""

from __future__ import annotations

import json
import os
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
    manifest = Manifest.from_json(packed.metadata.manifest)
    ranks = {(entry.layer, entry.module): entry.rank for entry in manifest.lora}
    padded_rank, tensors = packed.metadata.lora_rank, _expert_tensors(packed, manifest)

    def put(name: str, array: np.ndarray) -> None:
        tensors[name] = DTYPE_CODES[packed.metadata.dtype], array.shape, array

    for name, module in packed.metadata.modules.items():
        a, b = packed.tensors[f"lora.{name}.a"], packed.tensors[f"lora.{name}.b"]
        for place, layer in enumerate(module.layers):
            first_row = 0
            for number, (part, rows) in enumerate(zip(PARTS_OF[name], module.part_rows, strict=True)):
                if (rank := ranks.get((layer, part))) is not None:
                    first_rank = number * padded_rank
                    put(f"lora.{layer}.{part}.A", a[place, first_rank : first_rank + rank])
                    put(f"lora.{layer}.{part}.B", b[place, first_row : first_row + rows, :rank])
                first_row += rows
    if (reft := packed.metadata.reft) is not None:
        for place, (layer, rank) in enumerate(zip(reft.layers, reft.ranks, strict=True)):
            put(f"reft.{layer}.A", packed.tensors["reft.a"][place, :rank])
            put(f"reft.{layer}.B", packed.tensors["reft.b"][place, :, :rank].T)
            put(f"reft.{layer}.bias", packed.tensors["reft.bias"][place, :rank])
    return tensors


def _expert_tensors(packed: PackedRevision, manifest: Manifest) -> dict[str, Encoded]:
    tensors: dict[str, Encoded] = {}
    if (experts := packed.metadata.experts) is None:
        return tensors
    code = DTYPE_CODES[packed.metadata.dtype]
    ranks = {
        (entry.layer, expert, entry.module): entry.rank
        for entry in manifest.experts
        for expert in numbers_in(entry.experts)
    }
    for name, module in experts.modules.items():
        a, b = packed.tensors[f"lora.{name}.a"], packed.tensors[f"lora.{name}.b"]
        places = ((layer, e) for layer, own in zip(module.layers, module.experts, strict=True) for e in numbers_in(own))
        for place, (layer, expert) in enumerate(places):
            first_row = 0
            for number, (part, rows) in enumerate(zip(EXPERT_PARTS_OF[name], module.part_rows, strict=True)):
                if (rank := ranks.get((layer, expert, part))) is not None:
                    first_rank, where = number * experts.rank, f"lora.{layer}.experts.{expert}.{part}"
                    own_a = a[place, first_rank : first_rank + rank]
                    own_b = b[place, first_row : first_row + rows, :rank]
                    tensors[f"{where}.A"] = code, own_a.shape, own_a
                    tensors[f"{where}.B"] = code, own_b.shape, own_b
                first_row += rows
    return tensors
