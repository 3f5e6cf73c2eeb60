"""Packing an adapter: everything that would be done to it at each load is done once, here."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from adapters.base_model import BaseModel
from adapters.durable import fsync_folder
from adapters.errors import AdapterIncompatible
from adapters.formats.safetensors_file import encode, write_safetensors
from adapters.manifest import Manifest, revision_id_of
from adapters.normal_form import Adapter, ReftFactors
from adapters.packed.fused_layout import ENGINE_MODULE_OF, PARTS_OF, part_rows
from adapters.packed.metadata import DTYPE_CODES, PackedMetadata, PackedModule, PackedReft
from adapters.serving import EngineDtype, check_fits, scaled_lora_b, scaled_reft_b

STORAGE_DTYPES: dict[str, str] = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


def write_packed(adapter: Adapter, base: BaseModel, dtype: EngineDtype, path: Path) -> None:
    """Makes `path` the packed form of an adapter, at once or not at all, and on the disk.

    The same adapter and dtype always give the same bytes. Holds all packed tensors in memory while it writes.
    Raises AdapterIncompatible where a value does not fit the dtype or the adapter is for another base model.
    """
    if adapter.base_fingerprint != base.fingerprint:
        raise AdapterIncompatible(
            f"the adapter was read for the base model {adapter.base_fingerprint}, this one is {base.fingerprint}"
        )
    arrays: dict[str, np.ndarray] = {}
    modules = _module_layers(adapter)
    for module, layers in modules.items():
        arrays[f"lora.{module}.a"], arrays[f"lora.{module}.b"] = _packed_lora(adapter, base, dtype, module, layers)
    if adapter.reft:
        arrays["reft.a"], arrays["reft.b"], arrays["reft.bias"] = _packed_reft(adapter.reft, dtype)
    digest = hashlib.sha256()
    for _, array in sorted(arrays.items()):  # the order in the file
        digest.update(array.reshape(-1).view(np.uint8).data)
    metadata = PackedMetadata(
        revision_id=revision_id_of(adapter),
        dtype=dtype,
        positions=adapter.positions,
        base_fingerprint=base.fingerprint,
        lora_rank=adapter.max_rank if modules else 0,
        modules={module: PackedModule(layers, part_rows(base, module)) for module, layers in modules.items()},
        reft=_reft_metadata(adapter.reft),
        tensors_sha256=digest.hexdigest(),
        manifest=Manifest.of(adapter).to_json(),
    )
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        tensors = {}
        for name in list(arrays):
            array = arrays.pop(name)  # not all of them in memory twice
            tensors[name] = (DTYPE_CODES[dtype], array.shape, array.tobytes())
        write_safetensors(temporary, tensors, metadata.to_header())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _module_layers(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """The layers in which an engine module has any part adapted: the whole of it is stored then, zeros included."""
    layers: dict[str, set[int]] = {}
    for layer, part in adapter.lora:
        layers.setdefault(ENGINE_MODULE_OF[part], set()).add(layer)
    return {module: tuple(sorted(layers[module])) for module in PARTS_OF if module in layers}


def _packed_lora(
    adapter: Adapter, base: BaseModel, dtype: EngineDtype, module: str, layers: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """A [L', parts * rank, in] and s B [L', rows, rank] of one engine module."""
    parts, rows, rank = PARTS_OF[module], part_rows(base, module), adapter.max_rank
    storage = STORAGE_DTYPES[dtype]
    a = np.zeros((len(layers), len(parts) * rank, base.shape_of(parts[0])[1]), storage)
    b = np.zeros((len(layers), sum(rows), rank), storage)
    for place, layer in enumerate(layers):
        first_row = 0
        for number, part in enumerate(parts):
            if (factors := adapter.lora.get((layer, part))) is not None:
                where = f"layer {layer} {part}"
                own_a = _stored(factors.a, dtype, f"{where}: the A")
                a[place, number * rank : number * rank + factors.rank] = own_a
                own_b = _stored(scaled_lora_b(factors), dtype, f"{where}: the scaled B")
                b[place, first_row : first_row + rows[number], : factors.rank] = own_b
            first_row += rows[number]
    return a, b


def _packed_reft(reft: Mapping[int, ReftFactors], dtype: EngineDtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [L', rank, hidden], s B^T [L', hidden, rank] and bias [L', rank]."""
    rank, hidden = max(factors.rank for factors in reft.values()), next(iter(reft.values())).a.shape[1]
    storage = STORAGE_DTYPES[dtype]
    a, b = np.zeros((len(reft), rank, hidden), storage), np.zeros((len(reft), hidden, rank), storage)
    bias = np.zeros((len(reft), rank), storage)
    for place, (layer, factors) in enumerate(sorted(reft.items())):
        where = f"layer {layer} ReFT"
        a[place, : factors.rank] = _stored(factors.a, dtype, f"{where}: the A")
        b[place, :, : factors.rank] = _stored(scaled_reft_b(factors), dtype, f"{where}: the scaled B").T
        bias[place, : factors.rank] = _stored(factors.bias, dtype, f"{where}: the bias")
    return a, b, bias


def _reft_metadata(reft: Mapping[int, ReftFactors]) -> PackedReft | None:
    layers = tuple(sorted(reft))
    return PackedReft(layers, tuple(reft[layer].rank for layer in layers)) if layers else None


def _stored(values: np.ndarray, dtype: EngineDtype, what: str) -> np.ndarray:
    """The values in the dtype's storage. Raises AdapterIncompatible where one does not fit."""
    check_fits(what, values, dtype)
    _, shape, data = encode(values, dtype)
    return np.frombuffer(data, STORAGE_DTYPES[dtype]).reshape(shape)
