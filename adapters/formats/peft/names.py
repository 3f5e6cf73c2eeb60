"""Parse the names of a PEFT LoRA's tensors: which module or parameter each belongs to.

model.layers.0.self_attn.q_proj.lora_A.weight              a projection
model.layers.0.mlp.experts.17.gate_proj.lora_A.weight      one of an expert's (Mixtral: block_sparse_moe…w1, w3, w2)
model.layers.0.mlp.experts.base_layer.lora_A.weight        all experts' at once: peft's wrapper of the parameter in
model.layers.0.mlp.experts.lora_A.weight                   which transformers 5 keeps them (`target_parameters`)
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from adapters.errors import AdapterError, AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.model.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_experts, name_of_module

_NUMBER = r"0|[1-9][0-9]{0,5}"
_LAYER = (
    rf"(?:base_model\.model\.)?(?:model\.)?(?P<inner_model>language_model\.(?:model\.)?)?layers\.(?P<layer>{_NUMBER})"
)
_FACTOR = r"lora_(?P<factor>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight"
_MODULE_KEY = re.compile(rf"{_LAYER}\.(?P<block>self_attn|mlp)\.(?P<module>\w+)\.{_FACTOR}", re.ASCII)
_EXPERT_KEY = re.compile(
    rf"{_LAYER}\.(?P<block>mlp|block_sparse_moe)\.experts\.(?P<expert>{_NUMBER})\.(?P<module>\w+)\.{_FACTOR}", re.ASCII
)
_WRAPPER_KEY = re.compile(rf"{_LAYER}\.mlp\.experts(?P<inner>\.base_layer)?\.{_FACTOR}", re.ASCII)
_VISION_TOWER = (
    "it changes the vision tower, and the model is served as text; train without it, in peft by "
    "exclude_modules='.*(visual|vision_tower).*'"
)
# A part of a tensor's name -> why it is not served.
_REFUSED_TENSORS = {
    "lora_magnitude_vector": "it belongs to DoRA; train without use_dora",
    "lora_embedding": "LoRA on embeddings is not served; leave embed_tokens out of target_modules",
    "embed_tokens": "LoRA on embeddings is not served; leave embed_tokens out of target_modules",
    "lm_head": "LoRA on the output head is not served; leave lm_head out of target_modules, in Tinker by "
    "train_unembed=False",
    ".shared_experts.": "LoRA on experts that all tokens share is not served; name the projections of attention in "
    "target_modules, q_proj, k_proj, v_proj and o_proj",
    ".visual.": _VISION_TOWER,
    ".vision_tower.": _VISION_TOWER,
    "modules_to_save": "fully trained modules are not served; train without modules_to_save",
    "v_head": "it is the value head of an RL trainer; save the adapter alone, with pretrained_model.save_pretrained",
    ".base_layer.": "it is a weight of the base model; save only the adapter",
    ".bias": "trained biases are not served; train with bias='none' and lora_bias=False",
}
_OF_A_ROUTER = re.compile(r".*\.(mlp|block_sparse_moe)\.(gate|router)\.lora_.*")
ROUTER_REFUSED = (
    "LoRA on a router changes which experts are chosen, and is not served; train without it: name the projections in "
    "target_modules, such as q_proj, gate_proj, up_proj and down_proj"
)


@dataclass(slots=True)
class Pair:
    """The names of the two tensors of one module."""

    key: str  # peft's name of the module, such as model.layers.0.self_attn.q_proj
    layer: int
    module: str  # may be fused; in normal form, gate_proj where the file says w1
    expert: int | None  # None: outside of experts
    tensors: dict[str, str] = field(default_factory=dict)  # "A" or "B" -> tensor name

    @property
    def parts(self) -> tuple[str, ...]:
        """The projections in it."""
        return FUSED_MODULES.get(self.module, (self.module,))


@dataclass(slots=True)
class Wrapper:
    """The names of the two tensors with which peft wraps one parameter of a layer's experts."""

    experts: str  # peft's name of the layer's experts
    layer: int
    is_inner: bool  # inside another wrapper of the same experts
    tensors: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """peft's name of the wrapper."""
        return self.experts + (".base_layer" if self.is_inner else "")


@dataclass(frozen=True, slots=True)
class Named:
    """All tensors of a file, sorted by layer."""

    pairs: list[Pair]  # of projections outside of experts
    expert_pairs: list[Pair]
    wrappers: list[Wrapper]


def named_tensors(tensors: Iterable[str], base: BaseModel) -> Named:
    """Group a file's tensors by module, each with exactly an A and a B. Raises a subclass of AdapterError."""
    found: dict[str, Pair | Wrapper] = {}  # by key
    adapters: set[str] = set()
    for tensor in tensors:
        match = _WRAPPER_KEY.fullmatch(tensor) or _MODULE_KEY.fullmatch(tensor) or _EXPERT_KEY.fullmatch(tensor)
        if match is None:
            raise _unknown_tensor(tensor)
        if (layer := int(match["layer"])) >= base.num_layers:
            raise AdapterIncompatible(
                f"tensor {tensor!r} is for layer {layer}, but the base model has layers 0 to {base.num_layers - 1} "
                f"({base}); the adapter was made for another model"
            )
        if match["inner_model"] and not base.is_multimodal:
            raise AdapterIncompatible(
                f"tensor {tensor!r} is for the language model inside a multimodal model, which the base model ({base}) "
                "is not; the adapter was made for another model"
            )
        owner = _owner(match, tensor, layer, base)
        owner = found.setdefault(owner.key, owner)
        if match["factor"] in owner.tensors:
            raise AdapterMalformed(f"{owner.tensors[match['factor']]!r} and {tensor!r} are the same tensor; keep one")
        owner.tensors[match["factor"]] = tensor
        adapters.add(match["adapter"] or "")
    if len(adapters) > 1:
        raise AdapterMalformed(f"the file holds several adapters ({', '.join(sorted(adapters))}); save each by itself")
    if not found:
        raise AdapterMalformed("the adapter has no tensors; save the trained adapter again")
    for owner in found.values():
        if len(owner.tensors) == 1:
            (factor, tensor), *_ = owner.tensors.items()
            raise AdapterMalformed(
                f"{tensor!r} has no lora_{'B' if factor == 'A' else 'A'} beside it; the file is incomplete"
            )
    pairs = [owner for owner in found.values() if isinstance(owner, Pair)]
    wrappers = [owner for owner in found.values() if isinstance(owner, Wrapper)]
    return Named(
        sorted((p for p in pairs if p.expert is None), key=lambda pair: (pair.layer, pair.module)),
        sorted((p for p in pairs if p.expert is not None), key=lambda p: (p.layer, p.expert or 0, p.module)),
        sorted(wrappers, key=lambda wrapper: (wrapper.layer, wrapper.is_inner)),
    )


def expert_key(base: BaseModel, layer: int, expert: int, module: str) -> str:
    """peft's name of an expert's projection in files that keep experts separate, as transformers 4 does."""
    block, names = _expert_names(base)
    return f"{base.layers_name}.{layer}.{block}.experts.{expert}.{names[module]}"


def endings(key: str) -> Iterator[str]:
    """All entries of a list of module names that would name the module `key`: itself, and each suffix after a dot."""
    parts = key.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def expert_projections(base: BaseModel) -> Iterable[str]:
    """The projections of an expert in such files."""
    return _expert_names(base)[1].values()


def _expert_names(base: BaseModel) -> tuple[str, Mapping[str, str]]:
    return base.family.experts or ("", {})


def _owner(match: re.Match[str], tensor: str, layer: int, base: BaseModel) -> Pair | Wrapper:
    """The module or wrapper that a tensor belongs to, still without tensors."""
    if match.re is _MODULE_KEY:
        module = match["module"]
        _check_module(match, tensor, layer, base)
        return Pair(name_of_module(layer, module, base.layers_name), layer, module, None)
    if base.experts is None or not base.has_experts(layer):
        raise AdapterIncompatible(
            f"tensor {tensor[:200]!r} is for experts, which layer {layer} of the base model ({base}) has not; the "
            "adapter was made for another model"
        )
    if match.re is _WRAPPER_KEY:
        return Wrapper(name_of_experts(layer, base.layers_name), layer, is_inner=match["inner"] is not None)
    expert = int(match["expert"])
    if expert >= base.experts.count:
        raise AdapterIncompatible(
            f"tensor {tensor!r} is for expert {expert}, but the base model has experts 0 to {base.experts.count - 1} "
            f"({base}); the adapter was made for another model"
        )
    block, names = _expert_names(base)
    module = next((module for module, name in names.items() if name == match["module"]), "")
    if match["block"] != block or not module:
        raise AdapterIncompatible(
            f"tensor {tensor[:200]!r} is not of {base.architecture}, whose experts are named "
            f"{block}.experts.0.{', '.join(names.values())}"
        )
    return Pair(expert_key(base, layer, expert, module), layer, module, expert)


def _check_module(match: re.Match[str], tensor: str, layer: int, base: BaseModel) -> None:
    module = match["module"]
    if module not in MODULES and module not in FUSED_MODULES:
        if _OF_A_ROUTER.fullmatch(tensor) and base.has_experts(layer):
            raise AdapterUnsupported(f"tensor {tensor[:200]!r} is not served: {ROUTER_REFUSED}")
        raise AdapterIncompatible(
            f"tensor {tensor!r} is for the module {module!r}, which {base.architecture} does not have or which "
            f"cannot be adapted; there are {', '.join((*MODULES, *FUSED_MODULES))}"
        )
    if f".{match['block']}.{module}" not in name_of_module(layer, module):
        raise AdapterMalformed(f"tensor {tensor!r}: {module} is not in {match['block']}")
    if match["block"] == "mlp" and base.has_experts(layer):
        raise AdapterIncompatible(
            f"tensor {tensor!r} is for the MLP of layer {layer}, which has experts in its place ({base}); the adapter "
            "was made for another model"
        )


def _unknown_tensor(tensor: str) -> AdapterError:
    if _OF_A_ROUTER.fullmatch(tensor):
        return AdapterUnsupported(f"tensor {tensor[:200]!r} is not served: {ROUTER_REFUSED}")
    if "lora_" not in tensor and ("embed_tokens" in tensor or "lm_head" in tensor):
        return AdapterUnsupported(
            f"tensor {tensor[:200]!r} is a weight of the base model, which peft adds where the vocabulary was resized: "
            "train with the base model's tokenizer, or save with save_embedding_layers=False if no token is new"
        )
    for part, reason in _REFUSED_TENSORS.items():
        if part in tensor:
            return AdapterUnsupported(f"tensor {tensor[:200]!r} is not served: {reason}")
    return AdapterMalformed(
        f"tensor {tensor[:200]!r} is not known, and an adapter is never served in part; LoRA tensors are named "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )
