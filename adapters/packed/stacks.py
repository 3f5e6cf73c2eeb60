"""Produce the tensors of a packed file layer by layer while it is written."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from adapters.formats.safetensors_file import STORAGE_DTYPES, StreamedTensor, encode
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import ExpertFactors, LoraFactors, ReftFactors
from adapters.model.serving import EngineDtype, check_fits, scaled_lora_b, scaled_reft_b
from adapters.packed.fused_layout import ALL_PARTS_OF, part_shapes
from adapters.packed.metadata import PackedModule

Stacks = dict[str, StreamedTensor]
_Parts = Sequence[tuple[LoraFactors | ExpertFactors | None, str]]  # of one engine module, with where; None: zeros


def lora_stacks(
    factors: Mapping[Any, LoraFactors | ExpertFactors],
    modules: Mapping[str, PackedModule],
    rank: int,
    base: BaseModel,
    dtype: EngineDtype,
) -> Stacks:
    """A [N, parts * rank, in] and s B [N, rows, rank] of each engine module, N over its places.

    `factors`: by (layer, part) or (layer, expert, part).
    """
    stacks: Stacks = {}
    for name, module in modules.items():
        parts, places = ALL_PARTS_OF[name], []
        for place in module.places:
            where = " ".join(f"{what} {number}" for what, number in zip(("layer", "expert"), place, strict=False))
            places.append([(factors.get((*place, part)), f"{where} {part}") for part in parts])
        stacks |= _stacks(name, places, module.part_rows, part_shapes(base, name)[0][1], rank, dtype)
    return stacks


def _stacks(
    name: str, places: Sequence[_Parts], rows: tuple[int, ...], size_in: int, rank: int, dtype: EngineDtype
) -> Stacks:
    """Both tensors of an engine module, place by place; each part is padded to the rank."""
    storage, shape_a, shape_b = STORAGE_DTYPES[dtype], (len(rows) * rank, size_in), (sum(rows), rank)

    def a() -> Iterator[np.ndarray]:
        for parts in places:
            piece = np.zeros(shape_a, storage)
            for number, (factors, where) in enumerate(parts):
                if factors is not None:
                    own = _stored(factors.a, dtype, f"{where}: the A")
                    piece[number * rank : number * rank + factors.rank] = own
            yield piece

    def b() -> Iterator[np.ndarray]:
        for parts in places:
            piece, first_row = np.zeros(shape_b, storage), 0
            for (factors, where), own_rows in zip(parts, rows, strict=True):
                if factors is not None:
                    own = _stored(scaled_lora_b(factors), dtype, f"{where}: the scaled B")
                    piece[first_row : first_row + own_rows, : factors.rank] = own
                first_row += own_rows
            yield piece

    return {
        f"lora.{name}.a": StreamedTensor((len(places), *shape_a), storage, a),
        f"lora.{name}.b": StreamedTensor((len(places), *shape_b), storage, b),
    }


def reft_stacks(reft: Mapping[int, ReftFactors], dtype: EngineDtype) -> Stacks:
    """A [L', rank, hidden], s B^T [L', hidden, rank] and bias [L', rank]."""
    rank, hidden = max(factors.rank for factors in reft.values()), next(iter(reft.values())).a.shape[1]
    storage = STORAGE_DTYPES[dtype]

    def a() -> Iterator[np.ndarray]:
        for layer, factors in sorted(reft.items()):
            piece = np.zeros((rank, hidden), storage)
            piece[: factors.rank] = _stored(factors.a, dtype, f"layer {layer} ReFT: the A")
            yield piece

    def b() -> Iterator[np.ndarray]:
        for layer, factors in sorted(reft.items()):
            piece = np.zeros((hidden, rank), storage)
            piece[:, : factors.rank] = _stored(scaled_reft_b(factors), dtype, f"layer {layer} ReFT: the scaled B").T
            yield piece

    def bias() -> Iterator[np.ndarray]:
        for layer, factors in sorted(reft.items()):
            piece = np.zeros(rank, storage)
            piece[: factors.rank] = _stored(factors.bias, dtype, f"layer {layer} ReFT: the bias")
            yield piece

    return {
        "reft.a": StreamedTensor((len(reft), rank, hidden), storage, a),
        "reft.b": StreamedTensor((len(reft), hidden, rank), storage, b),
        "reft.bias": StreamedTensor((len(reft), rank), storage, bias),
    }


def _stored(values: np.ndarray, dtype: EngineDtype, what: str) -> np.ndarray:
    """Convert values to the dtype's storage. Raises AdapterIncompatible if one does not fit."""
    check_fits(what, values, dtype)
    _, shape, data = encode(values, dtype)
    return np.frombuffer(data, STORAGE_DTYPES[dtype]).reshape(shape)
