"""Reads a PEFT LoRA directory: adapter_config.json and adapter_model.safetensors.

What peft itself would do is the standard, with one difference: peft drops tensors that its configuration does not name,
and here they are an error, since an adapter must compute what its author trained or not load at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from adapters.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_module
from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import MAX_CONFIG_BYTES, Fields, is_integer, parse_object
from adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from adapters.formats.peft_targets import ALL_LINEAR, Stopwatch, Targets, names
from adapters.formats.weights import Weights, open_weights
from adapters.normal_form import Adapter, FloatArray, LoraFactors, frozen_array

WEIGHTS_STEM = "adapter_model"

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<block>self_attn|mlp)\.(?P<module>\w+)"
    r"\.lora_(?P<factor>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight",
    re.ASCII,
)
# A part of a tensor's name -> why it is not served.
_REFUSED_TENSORS = {
    "lora_magnitude_vector": "it belongs to DoRA; train without use_dora",
    "lora_embedding": "LoRA on embeddings is not served; leave embed_tokens out of target_modules",
    "embed_tokens": "LoRA on embeddings is not served; leave embed_tokens out of target_modules",
    "lm_head": "LoRA on the output head is not served; leave lm_head out of target_modules",
    "modules_to_save": "fully trained modules are not served; train without modules_to_save",
    ".base_layer.": "it is a weight of the base model; save only the adapter",
    ".bias": "trained biases are not served; train with bias='none' and lora_bias=False",
}
_EMBEDDINGS = ("model.embed_tokens", "lm_head")


@dataclass(slots=True)
class _Pair:
    """The names of the two tensors of one module."""

    layer: int
    module: str  # may be fused
    tensors: dict[str, str] = field(default_factory=dict)  # "A" or "B" -> tensor name

    @property
    def key(self) -> str:
        """peft's name of the module."""
        return name_of_module(self.layer, self.module)


def read_peft_lora(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """The adapter in normal form. Raises a subclass of AdapterError."""
    config = PeftConfig.parse(Fields.read(folder, CONFIG_NAME))
    _refuse_added_tokens(folder, base)
    with open_weights(folder, WEIGHTS_STEM) as weights:
        pairs = _pairs(weights, base)
        _check_targets(config, pairs, base)
        lora: dict[tuple[int, str], LoraFactors] = {}
        stopwatch = config.stopwatch()
        for pair in pairs:
            stopwatch.check(CONFIG_NAME)
            for module, factors in _read_pair(pair, weights, config, base, folder):
                if (pair.layer, module) in lora:
                    raise AdapterMalformed(
                        f"layer {pair.layer} has a LoRA for {module} twice: by itself and inside a fused projection"
                    )
                lora[pair.layer, module] = factors
    return Adapter(lora, {}, config.positions, base.fingerprint, folder.num_bytes)


def _pairs(weights: Weights, base: BaseModel) -> list[_Pair]:
    """The modules that have tensors, each with exactly an A and a B."""
    pairs: dict[tuple[int, str], _Pair] = {}
    adapters: set[str] = set()
    for tensor in weights:
        match = _KEY.fullmatch(tensor)
        if match is None:
            raise _unknown_tensor(tensor)
        layer, module = int(match["layer"]), match["module"]
        if module not in MODULES and module not in FUSED_MODULES:
            raise AdapterIncompatible(
                f"tensor {tensor!r} is for the module {module!r}, which {base.architecture} does not have or which "
                f"cannot be adapted; there are {', '.join((*MODULES, *FUSED_MODULES))}"
            )
        if f".{match['block']}.{module}" not in name_of_module(layer, module):
            raise AdapterMalformed(f"tensor {tensor!r}: {module} is not in {match['block']}")
        if layer >= base.num_layers:
            raise AdapterIncompatible(
                f"tensor {tensor!r} is for layer {layer}, but the base model has layers 0 to {base.num_layers - 1} "
                f"({base}); the adapter was made for another model"
            )
        pair = pairs.setdefault((layer, module), _Pair(layer, module))
        if match["factor"] in pair.tensors:
            raise AdapterMalformed(f"{pair.tensors[match['factor']]!r} and {tensor!r} are the same tensor; keep one")
        pair.tensors[match["factor"]] = tensor
        adapters.add(match["adapter"] or "")
    if len(adapters) > 1:
        raise AdapterMalformed(f"the file holds several adapters ({', '.join(sorted(adapters))}); save each by itself")
    if not pairs:
        raise AdapterMalformed("the adapter has no tensors; save the trained adapter again")
    for pair in pairs.values():
        if len(pair.tensors) == 1:
            (factor, tensor), *_ = pair.tensors.items()
            raise AdapterMalformed(
                f"{tensor!r} has no lora_{'B' if factor == 'A' else 'A'} beside it; the file is incomplete"
            )
    return sorted(pairs.values(), key=lambda pair: (pair.layer, pair.module))


def _unknown_tensor(tensor: str) -> AdapterMalformed | AdapterUnsupported:
    for part, reason in _REFUSED_TENSORS.items():
        if part in tensor:
            return AdapterUnsupported(f"tensor {tensor[:200]!r} is not served: {reason}")
    return AdapterMalformed(
        f"tensor {tensor[:200]!r} is not known, and an adapter is never served in part; LoRA tensors are named "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )


def _read_pair(
    pair: _Pair, weights: Weights, config: PeftConfig, base: BaseModel, folder: AdapterFolder
) -> Iterator[tuple[str, LoraFactors]]:
    """(module, factors) of one module; of each part where the module is a fused one."""
    a_name, b_name = pair.tensors["A"], pair.tensors["B"]
    size_out, size_in = base.shape_of(pair.module)
    a_shape, b_shape = weights.shape_of(a_name), weights.shape_of(b_name)
    rank = config.rank_of(pair.key)
    for name, shape in ((a_name, a_shape), (b_name, b_shape)):
        if len(shape) != 2:
            raise AdapterMalformed(f"tensor {name!r} has the shape {list(shape)}; it must have two dimensions")
        if 0 in shape:
            raise AdapterMalformed(f"tensor {name!r} has the shape {list(shape)}; a LoRA has a rank of at least 1")
    if a_shape[0] != b_shape[1]:
        raise AdapterMalformed(
            f"{a_name!r} has rank {a_shape[0]}, but {b_name!r} has rank {b_shape[1]}; they must agree"
        )
    if a_shape[0] != rank:
        raise AdapterMalformed(
            f"{a_name!r} has rank {a_shape[0]}, but {CONFIG_NAME} says {rank}; correct r or rank_pattern"
        )
    if a_shape[1] != size_in or b_shape[0] != size_out:
        raise AdapterIncompatible(
            f"{pair.key} is {size_out} x {size_in} in the base model ({base}), but the adapter's LoRA is "
            f"{b_shape[0]} x {a_shape[1]}; it was made for another model"
        )
    check_rank(rank, pair.key, folder)
    parts = FUSED_MODULES.get(pair.module, (pair.module,))
    for part in parts:
        if part not in folder.limits.target_modules:
            raise AdapterIncompatible(
                f"the adapter changes {part}, but this deployment adapts {', '.join(folder.limits.target_modules)}; "
                "add it to adapter_limits.target_modules"
            )
    a_file, b_file = weights.files[a_name], weights.files[b_name]
    dtype = common_dtype(a_file.dtype_of(a_name), b_file.dtype_of(b_name))
    a, b, scale, row = a_file.read(a_name), b_file.read(b_name), config.scale_of(pair.key), 0
    for part in parts:
        rows = base.shape_of(part)[0]
        yield part, LoraFactors(a, _rows(b, row, row + rows), scale, dtype)
        row += rows


def _rows(array: FloatArray, begin: int, end: int) -> FloatArray:
    return array if (begin, end) == (0, array.shape[0]) else frozen_array(array[begin:end])


def check_rank(rank: int, where: str, folder: AdapterFolder) -> None:
    """Raises AdapterIncompatible for a rank over the deployment's limit."""
    if rank > folder.limits.max_rank:
        raise AdapterIncompatible(
            f"{where} has rank {rank}, over this deployment's limit of {folder.limits.max_rank}; "
            "train with a lower rank or raise adapter_limits.max_rank"
        )


def common_dtype(*dtypes: str) -> str:
    """The narrowest dtype that holds values of all of them exactly."""
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def _check_targets(config: PeftConfig, pairs: list[_Pair], base: BaseModel) -> None:
    """Tensors and configuration must name the same modules; of a module named on all layers, some layers may lack it.

    peft starts such absent ones at zero, so leaving them out changes nothing. A named module without any tensor,
    however, shows that the file is not the one that the configuration describes.
    """
    targets, stopwatch = config.targets, config.stopwatch()
    keys = {pair.key for pair in pairs}
    for name in _EMBEDDINGS:
        if targets.modules != ALL_LINEAR and _names_embedding(targets, name):
            raise AdapterUnsupported(
                f"{targets.where}: target_modules names {name}; embeddings and the head are not served"
            )
    for key in sorted(keys):
        stopwatch.check(targets.where)
        if not targets.match(key):
            raise AdapterMalformed(
                f"there are tensors for {key}, but {targets.where} does not name it (target_modules "
                f"{str(targets.modules)[:120]}); peft would drop them, so correct the configuration"
            )
    covered = keys | {name_of_module(pair.layer, part) for pair in pairs for part in FUSED_MODULES.get(pair.module, ())}
    for entry, wanted in _wanted(targets, base, stopwatch):
        if wanted and not wanted & covered:
            raise AdapterMalformed(
                f"{targets.where}: target_modules names {entry}, but there are no tensors for it; the file is "
                "incomplete"
            )


def _names_embedding(targets: Targets, name: str) -> bool:
    if isinstance(targets.modules, str):
        return targets.match(name)
    return any(names(entry, name) for entry in targets.modules) and not targets.excludes(name)


def _wanted(targets: Targets, base: BaseModel, stopwatch: Stopwatch) -> Iterator[tuple[str, set[str]]]:
    """(what the configuration names, the base model's modules that it means), one by one."""
    matched: dict[tuple[int, str], str] = {}
    for layer in range(base.num_layers):
        stopwatch.check(targets.where)
        for module in MODULES:
            if targets.match(key := name_of_module(layer, module)):
                matched[layer, module] = key
    if isinstance(targets.modules, str):
        for module in MODULES:
            yield module, {key for (_, other), key in matched.items() if other == module}
    else:
        for entry in targets.modules:
            yield entry, {key for key in matched.values() if names(entry, key)}
    for layer in targets.layers:
        if layer >= base.num_layers:
            raise AdapterIncompatible(
                f"{targets.where}: layers_to_transform names layer {layer}, but the base model has {base.num_layers} "
                "layers"
            )
        yield f"layer {layer}", {key for (other, _), key in matched.items() if other == layer}


def _refuse_added_tokens(folder: AdapterFolder, base: BaseModel) -> None:
    name = "added_tokens.json"
    if name not in folder.names:
        return
    tokens = parse_object(folder.read_small(name, MAX_CONFIG_BYTES), name)
    for token, number in tokens.items():
        if not is_integer(number):
            raise AdapterMalformed(
                f"{name}: the id of token {token[:60]!r} is {str(number)[:60]!r}; it must be an integer"
            )
        if number >= base.vocabulary:
            raise AdapterUnsupported(
                f"{name} adds token {token[:60]!r} with id {number}, beyond the base model's vocabulary of "
                f"{base.vocabulary}; "
                "adapters cannot add tokens"
            )
