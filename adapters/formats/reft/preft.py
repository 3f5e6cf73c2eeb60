"""Read an exported PreFT specification: preft_spec.json and preft_spec.safetensors.

The authors of PreFT (Lanpouthakoun et al. 2026) pass their refactored ReFT modules to an engine as one pickled
dictionary: the layers, the positions, how the module is constructed, and each layer's parameters, with the rotation
still parametrised. `pickle_conversion.convert_pickle` splits that pickle into these two files. Tensors are named
"<layer>.<parameter>".
"""

from __future__ import annotations

import re
from typing import Any

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields, is_number
from adapters.formats.reft.kinds import KINDS, ReftKind
from adapters.formats.reft.state import ReftState
from adapters.formats.weights import open_weights
from adapters.model.base_model import BaseModel
from adapters.model.normal_form import Adapter, Positions

SPEC_STEM = "preft_spec"
SPEC_NAME = f"{SPEC_STEM}.json"
_TENSOR = re.compile(r"(0|[1-9][0-9]{0,5})\.([A-Za-z0-9_.]+)")
_CLASS = re.compile(r"(LoReFT|DiReFT)(?:Adapter|Adaptor|Intervention)?", re.IGNORECASE)
_POSITIONS: dict[str, Positions] = {"prefill": "prefill", "all": "all", "all_tokens": "all"}
# Arguments of the module's constructor that do not change what a trained module computes.
_HARMLESS = (
    "hidden_size", "embed_dim", "low_rank_dim", "low_rank_dimension", "layer_idx", "device", "dtype", "dropout",
    "init_orth",
)  # fmt: skip
_LINEAR = (None, "linear", "identity")


def read_preft(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """Read the adapter in normal form. Raises a subclass of AdapterError."""
    fields = Fields.read(folder, SPEC_NAME)
    kind, scale = _kind(fields)
    position = fields.string("position", "prefill")
    if position not in _POSITIONS:
        raise AdapterUnsupported(
            f"{SPEC_NAME}: position {str(position)[:60]!r} is not served; {' and '.join(_POSITIONS)} are"
        )
    layers = fields.integers("layer_indices")
    if not layers or len(set(layers)) != len(layers):
        raise fields.wrong("layer_indices", "a list of different layers")
    if max(layers) >= base.num_layers:
        raise AdapterIncompatible(
            f"{SPEC_NAME}: layer_indices has layer {max(layers)}, but the base model has {base.num_layers} layers "
            f"({base})"
        )
    reft = {}
    with open_weights(folder, SPEC_STEM) as weights:
        states: dict[int, dict[str, str]] = {layer: {} for layer in layers}
        for tensor in weights:
            match = _TENSOR.fullmatch(tensor)
            if match is None or int(match[1]) not in states:
                raise AdapterMalformed(
                    f"tensor {tensor[:100]!r} is not '<layer>.<parameter>' of a layer in layer_indices"
                )
            states[int(match[1])][match[2]] = tensor
        for layer, tensors in states.items():
            if not tensors:
                raise AdapterMalformed(f"{SPEC_NAME}: layer_indices has layer {layer}, but there are no tensors for it")
            file = weights.files[next(iter(tensors.values()))]
            if any(weights.files[tensor] is not file for tensor in tensors.values()):
                raise AdapterMalformed(f"the tensors of layer {layer} are spread over several files; keep them in one")
            state = ReftState(file, tensors, base.hidden, f"layer {layer} of {SPEC_STEM}.safetensors")
            reft[layer] = state.read(kind, scale, folder)
    return Adapter({}, reft, _POSITIONS[position], base.fingerprint, folder.num_bytes)


def _kind(fields: Fields) -> tuple[ReftKind, float | None]:
    """The kind and its scale; None means DiReFT's default, 1/sqrt(rank)."""
    name = fields.string("adapter") or ""
    match = _CLASS.fullmatch(name)
    if match is None:
        raise AdapterUnsupported(
            f"{fields.where}: the adapter class {name[:100]!r} is not served; LoReFT and DiReFT are"
        )
    arguments: dict[str, Any] = fields.object("kwargs")
    for key, value in arguments.items():
        linear = key in ("act_fn", "activation") and value in _LINEAR
        if key == "scale" or key in _HARMLESS or linear or value is None or value is False:
            continue
        raise AdapterUnsupported(f"{fields.where}: the option {key[:60]!r} of {name} is not served; train without it")
    kind, scale = KINDS[match[1].lower()], arguments.get("scale")
    if scale is None:
        return kind, 1.0 if kind.subtracts_projection else None
    if not is_number(scale) or abs(scale) > 3e38:
        raise AdapterMalformed(f"{fields.where}: scale is {str(scale)[:60]!r}; it must be a finite number")
    return kind, float(scale)
