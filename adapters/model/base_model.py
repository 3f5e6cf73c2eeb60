"""The sizes of the base model, read from `config.json`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from adapters.errors import BaseModelInvalid

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
MODULES = ATTENTION_MODULES + MLP_MODULES

# A fused projection's rows are those of its parts, in this order.
FUSED_MODULES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# transformers' defaults for fields that config.json omits.
_GEMMA3: dict[str, int | None] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}  # fmt: skip
_ARCHITECTURES: dict[str, dict[str, int | None]] = {
    "LlamaForCausalLM": {"num_key_value_heads": None},  # as many as num_attention_heads
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
    },
    "MixtralForCausalLM": {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "Qwen3VLForConditionalGeneration": {"num_key_value_heads": 32, "head_dim": 128},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}  # fmt: skip
# Served as text: the decoder layers of a text model, whose sizes are in `text_config`, beside a vision tower.
_MULTIMODAL = ("Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration")
_WITH_EXPERTS = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")
_LAYERS = "model.layers"
_MAX_CONFIG_BYTES = 4 * 1024**2
_MAX_SIZE = 1 << 31


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that some layers have in place of an MLP. All experts have the same sizes."""

    count: int
    intermediate: int
    layers: tuple[int, ...]  # with experts, ascending
    per_token: int = field(default=1, compare=False)  # that compute a token; adapters do not depend on it


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The sizes of a decoder-only model. Two models with the same fingerprint take the same adapters."""

    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    name: str = field(default="", compare=False)  # the directory it was read from; not part of its identity
    experts: Experts | None = None  # None: every layer has an MLP
    context_length: int | None = field(default=None, compare=False)  # of config.json; None: it has none

    @classmethod
    def read(cls, model_dir: Path | str) -> Self:
        """Read `config.json` of a Hugging Face model directory. Raises BaseModelInvalid."""
        path = Path(model_dir) / "config.json"
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_CONFIG_BYTES + 1)
        except OSError as error:
            raise BaseModelInvalid(
                f"{path} cannot be read ({error.strerror}); the model's directory must hold a config.json"
            ) from error
        if len(text) > _MAX_CONFIG_BYTES:
            raise BaseModelInvalid(f"{path} is over {_MAX_CONFIG_BYTES} bytes, which no model's config.json is")
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BaseModelInvalid(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise BaseModelInvalid(f"{path} holds {type(config).__name__}, not a JSON object")
        return cls._from_config(config, path)

    @classmethod
    def _from_config(cls, config: dict[str, Any], path: Path) -> Self:
        architectures = config.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else None
        defaults = _ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
        if not isinstance(architecture, str) or defaults is None:
            raise BaseModelInvalid(
                f"{path}: architectures is {architectures!r}; adapters are served for {', '.join(_ARCHITECTURES)}"
            )
        config = text_fields(config, path)

        def size(key: str, *spellings: str) -> int:
            value = next((config[each] for each in (key, *spellings) if config.get(each) is not None), None)
            if value is None:
                value = defaults.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_SIZE:
                raise BaseModelInvalid(f"{path}: {key} is {value!r}; it must be a positive integer")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        is_multi_head = config.get("num_key_value_heads") is None and defaults["num_key_value_heads"] is None
        kv_heads = heads if is_multi_head else size("num_key_value_heads")
        if config.get("head_dim") is None and "head_dim" not in defaults:
            if hidden % heads:
                raise BaseModelInvalid(
                    f"{path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no "
                    "head_dim"
                )
            head_dim = hidden // heads
        else:
            head_dim = size("head_dim")
        num_layers, intermediate = size("num_hidden_layers"), size("intermediate_size")
        experts = None
        if architecture in _WITH_EXPERTS:
            # transformers 5 writes num_local_experts where earlier releases wrote num_experts
            count = size("num_experts", "num_local_experts")
            if config.get("num_local_experts") not in (None, count):
                raise BaseModelInvalid(
                    f"{path}: num_experts is {count}, but num_local_experts {config['num_local_experts']!r}; keep one"
                )
            is_mixtral = architecture == "MixtralForCausalLM"
            step = 1 if is_mixtral else size("decoder_sparse_step")
            without = () if is_mixtral else _layer_numbers(config, "mlp_only_layers", path)
            layers = tuple(n for n in range(num_layers) if n not in without and (n + 1) % step == 0)
            rows = intermediate if is_mixtral else size("moe_intermediate_size")
            experts = Experts(count, rows, layers, min(count, size("num_experts_per_tok")))
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=size("vocab_size"),
            name=str(path.parent),
            experts=experts,
            context_length=_context_length(defaults | config),
        )

    @property
    def is_multimodal(self) -> bool:
        """True for a model with a vision tower, which is served as text."""
        return self.architecture in _MULTIMODAL

    @property
    def layers_name(self) -> str:
        """The dotted name of the decoder layers inside transformers' model, which peft's tensors have."""
        return "model.language_model.layers" if self.is_multimodal else _LAYERS

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the architecture and the sizes; independent of weights and path."""
        sizes: tuple[Any, ...] = (
            self.architecture, self.num_layers, self.hidden, self.intermediate,
            self.heads, self.kv_heads, self.head_dim, self.vocabulary,
        )  # fmt: skip
        if self.experts is not None:
            sizes += (self.experts.count, self.experts.intermediate, self.experts.layers)
        return hashlib.sha256(json.dumps(["base-model-1", *sizes]).encode()).hexdigest()[:16]

    def has_experts(self, layer: int) -> bool:
        """True for a layer with experts in place of an MLP."""
        return self.experts is not None and layer in self.experts.layers

    def modules_of(self, layer: int) -> tuple[str, ...]:
        """The projections of a layer, without those of its experts."""
        return ATTENTION_MODULES if self.has_experts(layer) else MODULES

    def slot_modules(self, target_modules: Sequence[str] = MODULES) -> tuple[str, ...]:
        """The projections that engines have adapter slots for; of a mixture of experts only attention's."""
        return tuple(module for module in target_modules if self.experts is None or module in ATTENTION_MODULES)

    def expert_shape_of(self, module: str) -> tuple[int, int]:
        """(out, in) of a projection of one expert, the fused one included. Raises KeyError for any other."""
        if self.experts is None:
            raise KeyError(module)
        rows = self.experts.intermediate
        return {
            "gate_proj": (rows, self.hidden),
            "up_proj": (rows, self.hidden),
            "gate_up_proj": (2 * rows, self.hidden),
            "down_proj": (self.hidden, rows),
        }[module]

    def shape_of(self, module: str) -> tuple[int, int]:
        """(out, in) of a projection's weight, fused ones included. Raises KeyError for any other name."""
        if module in FUSED_MODULES:
            parts = [self.shape_of(part) for part in FUSED_MODULES[module]]
            return sum(out for out, _ in parts), parts[0][1]
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (key_value, self.hidden),
            "v_proj": (key_value, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[module]

    def __str__(self) -> str:
        experts = ""
        if self.experts is not None:
            experts = (
                f", {self.experts.count} experts of {self.experts.intermediate} in {len(self.experts.layers)} layers"
            )
        return (
            f"{self.architecture} with {self.num_layers} layers, hidden {self.hidden}, intermediate "
            f"{self.intermediate}, {self.heads}/{self.kv_heads} heads of {self.head_dim}, vocabulary {self.vocabulary}"
            f"{experts}"
        )


def _layer_numbers(config: dict[str, Any], key: str, path: Path) -> tuple[int, ...]:
    numbers = config.get(key) or []
    if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise BaseModelInvalid(f"{path}: {key} is {str(numbers)[:80]}; it must be a list of layer numbers")
    return tuple(numbers)


def text_fields(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of the language model in the `config.json` of a known architecture. Raises BaseModelInvalid."""
    if config["architectures"][0] not in _MULTIMODAL:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise BaseModelInvalid(f"{path}: text_config is {str(text)[:80]}; it must be an object with the text's sizes")
    return text


def name_of_module(layer: int, module: str, layers: str = _LAYERS) -> str:
    """The dotted name of a projection inside a transformers causal LM whose layers have that name."""
    block = "mlp" if module in MLP_MODULES or module == "gate_up_proj" else "self_attn"
    return f"{layers}.{layer}.{block}.{module}"


def name_of_experts(layer: int) -> str:
    """The dotted name of a layer's experts inside a transformers causal LM."""
    return f"model.layers.{layer}.mlp.experts"


def _context_length(config: dict[str, Any]) -> int | None:
    """As SGLang reads it, or more: a factor that stretches positions counts even where the length includes it."""
    length, scaling = config.get("max_position_embeddings"), config.get("rope_scaling")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 < length < _MAX_SIZE:
        return None
    factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
    is_factor = isinstance(factor, (int, float)) and 1 <= factor < 1000
    return int(length * factor) if is_factor else length
