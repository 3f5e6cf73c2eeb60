"""Pack an adapter: do once what every load would otherwise repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.files.durable import whole_file
from adapters.formats.safetensors_file import header_of, write_streamed
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter, ReftFactors
from adapters.model.number_ranges import ranges_of
from adapters.model.serving import EngineDtype
from adapters.packed.fused_layout import (
    ENGINE_MODULE_OF,
    EXPERT_MODULE_OF,
    EXPERT_PARTS_OF,
    PARTS_OF,
    expert_part_rows,
    part_rows,
)
from adapters.packed.metadata import (
    DTYPE_CODES,
    MAX_HEADER_BYTES,
    PackedExpertModule,
    PackedExperts,
    PackedMetadata,
    PackedModule,
    PackedReft,
)
from adapters.packed.stacks import Stacks, expert_stacks, lora_stacks, reft_stacks

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
    modules = {
        module: PackedModule(layers, part_rows(base, module)) for module, layers in _module_layers(adapter).items()
    }
    rank, experts = adapter.max_rank, _experts_metadata(adapter, base)
    stacks = lora_stacks(adapter, base, dtype, rank, modules)
    if experts is not None:
        stacks |= expert_stacks(adapter, base, dtype, experts)
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


def _module_layers(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """The layers in which any part of an engine module is adapted; the whole module is stored then, zeros included."""
    layers: dict[str, set[int]] = {}
    for layer, part in adapter.lora:
        layers.setdefault(ENGINE_MODULE_OF[part], set()).add(layer)
    return {module: tuple(sorted(layers[module])) for module in PARTS_OF if module in layers}


def _experts_metadata(adapter: Adapter, base: BaseModel) -> PackedExperts | None:
    """The experts in which any part of an engine module is adapted; all have the largest rank among experts."""
    if not adapter.experts:
        return None
    experts: dict[str, dict[int, set[int]]] = {}
    for layer, expert, part in adapter.experts:
        experts.setdefault(EXPERT_MODULE_OF[part], {}).setdefault(layer, set()).add(expert)
    return PackedExperts(
        rank=max(factors.rank for factors in adapter.experts.values()),
        modules={
            module: PackedExpertModule(
                layers=tuple(sorted(experts[module])),
                experts=tuple(ranges_of(sorted(own)) for _, own in sorted(experts[module].items())),
                part_rows=expert_part_rows(base, module),
            )
            for module in EXPERT_PARTS_OF
            if module in experts
        },
    )


def _reft_metadata(reft: Mapping[int, ReftFactors]) -> PackedReft | None:
    layers = tuple(sorted(reft))
    return PackedReft(layers, tuple(reft[layer].rank for layer in layers)) if layers else None
