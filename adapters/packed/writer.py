"""Pack an adapter: do once what every load would otherwise repeat."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.files.durable import whole_file
from adapters.formats.safetensors_file import header_of, write_streamed
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter, ReftFactors
from adapters.model.number_ranges import ranges_of
from adapters.model.serving import EngineDtype
from adapters.packed.fused_layout import ALL_PARTS_OF, ENGINE_MODULE_OF, EXPERT_MODULE_OF, EXPERT_PARTS_OF, part_shapes
from adapters.packed.metadata import (
    DTYPE_CODES,
    MAX_HEADER_BYTES,
    PackedExperts,
    PackedMetadata,
    PackedModule,
    PackedReft,
)
from adapters.packed.stacks import Stacks, lora_stacks, reft_stacks

_HeaderWith = Callable[[str], dict[str, str]]  # the metadata, from the digest of the tensors


def packed_bytes_of(adapter: Adapter, base: BaseModel, dtype: EngineDtype) -> int:
    """Size of the file that `write_packed` writes. Raises as it does, values aside."""
    stacks, header_with = _contents(adapter, base, dtype)
    return len(_header(stacks, dtype, header_with)) + sum(stack.num_bytes for stack in stacks.values())


def write_packed(adapter: Adapter, base: BaseModel, dtype: EngineDtype, path: Path) -> None:
    """Write the packed form of an adapter to `path`, durably, complete or not at all.

    The same adapter and dtype always give the same bytes. Beside the adapter, one layer of one packed tensor is in
    memory at a time. Raises AdapterIncompatible if a value does not fit the dtype or the adapter is for another base
    model, AdapterUnsupported if the header would be too large.
    """
    stacks, header_with = _contents(adapter, base, dtype)
    _header(stacks, dtype, header_with)
    with whole_file(path) as temporary:
        write_streamed(temporary, DTYPE_CODES[dtype], stacks, header_with)


def _contents(adapter: Adapter, base: BaseModel, dtype: EngineDtype) -> tuple[Stacks, _HeaderWith]:
    if adapter.base_fingerprint != base.fingerprint:
        raise AdapterIncompatible(
            f"the adapter was read for the base model {adapter.base_fingerprint}, this one is {base.fingerprint}"
        )
    modules, experts = _modules(adapter.lora, base), None
    rank = adapter.max_rank
    stacks = lora_stacks(adapter.lora, modules, rank, base, dtype)
    if adapter.experts:  # all have the largest rank among experts
        experts = PackedExperts(max(f.rank for f in adapter.experts.values()), _modules(adapter.experts, base))
        stacks |= lora_stacks(adapter.experts, experts.modules, experts.rank, base, dtype)
    if adapter.reft:
        stacks |= reft_stacks(adapter.reft, dtype)
    return stacks, _header_with(adapter, dtype, rank if modules else 0, modules, experts)


def _header(stacks: Stacks, dtype: EngineDtype, header_with: _HeaderWith) -> bytes:
    sizes = {name: (DTYPE_CODES[dtype], stack.shape, stack.num_bytes) for name, stack in stacks.items()}
    header = header_of(sizes, header_with("0" * 64))
    if len(header) > MAX_HEADER_BYTES:
        raise AdapterUnsupported(
            f"the packed file's header would have {len(header)} bytes, more than {MAX_HEADER_BYTES}: ranks, alphas or "
            "layers differ from tensor to tensor; give more of them the same"
        )
    return header


def _header_with(
    adapter: Adapter,
    dtype: EngineDtype,
    lora_rank: int,
    modules: Mapping[str, PackedModule],
    experts: PackedExperts | None,
) -> _HeaderWith:
    """A function that makes the metadata from the digest of the tensors."""
    revision_id, manifest = revision_id_of(adapter), Manifest.of(adapter).to_json()
    return lambda tensors_sha256: PackedMetadata(
        revision_id=revision_id,
        dtype=dtype,
        positions=adapter.positions,
        base_fingerprint=adapter.base_fingerprint,
        lora_rank=lora_rank,
        modules=modules,
        experts=experts,
        reft=_reft_metadata(adapter.reft),
        tensors_sha256=tensors_sha256,
        manifest=manifest,
    ).to_header()


def _modules(places: Iterable[Any], base: BaseModel) -> dict[str, PackedModule]:
    """The engine modules of which any part is adapted, with the layers, and in these the experts, where it is.

    The whole module is stored there, zeros included. `places`: (layer, part) or (layer, expert, part).
    """
    found: dict[str, dict[int, set[int]]] = {}
    for layer, *expert, part in places:
        name = (EXPERT_MODULE_OF if expert else ENGINE_MODULE_OF)[part]
        found.setdefault(name, {}).setdefault(layer, set()).update(expert)
    modules = {}
    for name in (name for name in ALL_PARTS_OF if name in found):
        layers = dict(sorted(found[name].items()))
        experts = tuple(ranges_of(sorted(own)) for own in layers.values()) if name in EXPERT_PARTS_OF else None
        modules[name] = PackedModule(tuple(layers), tuple(rows for rows, _ in part_shapes(base, name)), experts)
    return modules


def _reft_metadata(reft: Mapping[int, ReftFactors]) -> PackedReft | None:
    layers = tuple(sorted(reft))
    return PackedReft(layers, tuple(reft[layer].rank for layer in layers)) if layers else None
