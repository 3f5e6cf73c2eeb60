"""Read a pyreft directory: config.json and, for each intervention, intkey_*.safetensors.

pyreft itself writes intkey_*.bin, which are pickles; `pickle_conversion.convert_pickle` turns them into safetensors
with the same names. pyreft's formulas have no scale, so s is 1. It stores neither positions nor the activation
function: positions become "prefill", and the activation must have been linear, its default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields, is_integer
from adapters.formats.reft_kinds import KINDS, ReftKind
from adapters.formats.reft_state import ReftState
from adapters.formats.safetensors_file import open_safetensors
from adapters.formats.weights import no_weights
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, ReftFactors

CONFIG_NAME = "config.json"
FILE_PREFIX = "intkey_"
_SUFFIX = ".safetensors"

# The order of pyvene's RepresentationConfig, which is saved as a list.
_FIELDS = (
    "layer", "component", "unit", "max_number_of_units", "low_rank_dimension", "intervention_type", "intervention",
    "subspace_partition", "group_key", "intervention_link_key", "moe_key", "source_representation",
    "hidden_source_representation", "latent_dim",
)  # fmt: skip
_LAYER_OUTPUT = re.compile(r"(?:model\.)+layers\[([0-9]{1,6})\]\.output")
_TYPE = re.compile(r"(\w+?)Intervention(?:'>)?$", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Intervention:
    """One entry of the configuration."""

    layer: int
    kind: ReftKind
    rank: int | None
    stems: tuple[str, ...]  # possible names of its file, by version of pyvene


def is_pyreft(folder: AdapterFolder) -> bool:
    """True for a directory that pyreft wrote."""
    return CONFIG_NAME in folder.names and any(name.startswith(FILE_PREFIX) for name in folder.names)


def read_pyreft(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """Read the adapter in normal form. Raises a subclass of AdapterError."""
    interventions = _interventions(Fields.read(folder, CONFIG_NAME), base)
    files = {name for name in folder.names if name.startswith(FILE_PREFIX)}
    reft: dict[int, ReftFactors] = {}
    for intervention in interventions:
        name = next((f"{stem}{_SUFFIX}" for stem in intervention.stems if f"{stem}{_SUFFIX}" in files), None)
        if name is None:
            raise no_weights(folder, f"{intervention.stems[0]}{_SUFFIX}")
        files -= {name, name.removesuffix(_SUFFIX) + ".bin"}
        where = f"{name} (layer {intervention.layer})"
        with open_safetensors(folder, name) as file:
            state = ReftState(file, {tensor: tensor for tensor in file.tensors}, base.hidden, where)
            factors = state.read(intervention.kind, folder)
        if intervention.rank not in (None, factors.rank):
            raise AdapterMalformed(
                f"{where} has rank {factors.rank}, but {CONFIG_NAME} says low_rank_dimension {intervention.rank}"
            )
        reft[intervention.layer] = factors
    if files:
        raise AdapterMalformed(f"{CONFIG_NAME} does not mention {min(files)}; an adapter is never served in part")
    return Adapter({}, reft, "prefill", base.fingerprint, folder.num_bytes)


def _interventions(fields: Fields, base: BaseModel) -> list[_Intervention]:
    representations, types = fields.values.get("representations"), fields.values.get("intervention_types")
    if not isinstance(representations, list) or not representations:
        raise fields.wrong("representations", "a list with an entry for each intervention")
    if isinstance(types, str):
        types = [types] * len(representations)
    if not isinstance(types, list) or len(types) != len(representations):
        raise fields.wrong("intervention_types", f"a list of {len(representations)} types, one for each representation")
    result: dict[int, _Intervention] = {}
    for representation, type_name in zip(representations, types, strict=True):
        intervention = _intervention(_as_object(fields, representation), type_name, fields.where)
        if intervention.layer >= base.num_layers:
            raise AdapterIncompatible(
                f"{fields.where} intervenes on layer {intervention.layer}, but the base model has layers 0 to "
                f"{base.num_layers - 1} ({base}); the adapter was made for another model"
            )
        if intervention.layer in result:
            raise AdapterUnsupported(
                f"{fields.where} intervenes on layer {intervention.layer} twice, which pyreft does to treat the "
                "prompt's first "
                "and last tokens differently; train one intervention per layer for all prompt tokens"
            )
        result[intervention.layer] = intervention
    return list(result.values())


def _as_object(fields: Fields, representation: Any) -> dict[str, Any]:
    if isinstance(representation, list) and 3 <= len(representation) <= len(_FIELDS):
        return dict(zip(_FIELDS, representation, strict=False))
    if isinstance(representation, dict):
        return representation
    raise fields.wrong("representations", f"a list of objects or of lists of 3 to {len(_FIELDS)} fields")


def _intervention(representation: dict[str, Any], type_name: Any, where: str) -> _Intervention:
    match = _TYPE.search(type_name) if isinstance(type_name, str) and len(type_name) < 300 else None
    kind = KINDS.get(match[1].lower()) if match else None
    if kind is None:
        raise AdapterUnsupported(
            f"{where}: the intervention type {str(type_name)[:100]!r} is not served; of pyreft's there are "
            f"{', '.join(KINDS)}"
        )
    layer, component = representation.get("layer"), representation.get("component", "block_output")
    unit, count = representation.get("unit", "pos"), representation.get("max_number_of_units", 1)
    rank = representation.get("low_rank_dimension")
    stems: tuple[str, ...]
    if isinstance(component, str) and len(component) < 100 and (output := _LAYER_OUTPUT.fullmatch(component)):
        layer, component_stem = int(output[1]), component.replace(".", "_")
        stems = (f"comp_{component_stem}_unit_{unit}_nunit_{count}#0",)
    else:
        if component != "block_output":
            raise AdapterUnsupported(
                f"{where}: the component {str(component)[:60]!r} is not served; ReFT acts on block_output, the "
                "residual stream"
            )
        stems = (
            f"layer_{layer}_comp_{component}_unit_{unit}_nunit_{count}#0",
            f"layer.{layer}.comp.{component}.unit.{unit}.nunit.{count}#0",
            f"layer.{layer}.repr.{component}.unit.{unit}.nunit.{count}#0",
        )
    if unit != "pos":
        raise AdapterUnsupported(f"{where}: the unit {str(unit)[:60]!r} is not served; ReFT acts on positions, 'pos'")
    if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0 or not (rank is None or is_integer(rank)):
        raise AdapterMalformed(f"{where}: layer and low_rank_dimension must be integers")
    for key in ("subspace_partition", "moe_key", "source_representation", "hidden_source_representation", "latent_dim"):
        if representation.get(key):
            raise AdapterUnsupported(f"{where}: {key} is not served; train a plain {kind}")
    return _Intervention(layer, kind, rank, tuple(f"{FILE_PREFIX}{stem}" for stem in stems))
