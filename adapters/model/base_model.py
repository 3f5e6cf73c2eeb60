"""The sizes of the base model, read from `config.json`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from adapters.errors import BaseModelInvalid
from adapters.model.families import FAMILIES, WHY_NOT_SERVED, Family

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
MODULES = ATTENTION_MODULES + MLP_MODULES

# A fused projection's rows are those of its parts, in this order.
FUSED_MODULES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_LAYERS = "model.layers"
_MAX_CONFIG_BYTES = 4 * 1024**2
_MAX_SIZE = 1 << 31


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that some layers have in place of an MLP. All experts have the same sizes."""

    count: int
    intermediate: int
    layers: tuple[int, ...]  # with experts, ascending
    # Adapters do not depend on these.
    per_token: int = field(default=1, compare=False)  # that compute a token
    shared: int = field(default=0, compare=False)  # beside them, of the same sizes: compute every token


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
    has_mxfp4: bool = field(default=False, compare=False)  # its experts' weights are stored in MXFP4

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
        family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
        if not isinstance(architecture, str) or family is None:
            reason = WHY_NOT_SERVED.get(str(architecture))
            raise BaseModelInvalid(
                f"{path}: architectures is {architectures!r}{f', which is not served: {reason}' if reason else ''}; "
                f"adapters are served for {', '.join(FAMILIES)}"
            )
        config, defaults = text_fields(config, path), family.defaults

        def size(key: str, *spellings: str, minimum: int = 1) -> int:
            value = next((config[each] for each in (key, *spellings) if config.get(each) is not None), None)
            if value is None:
                value = defaults.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < _MAX_SIZE:
                wanted = "a positive integer" if minimum else "0 or a positive integer"
                raise BaseModelInvalid(f"{path}: {key} is {value!r}; it must be {wanted}")
            return value

        def own(key: str, otherwise: int, minimum: int = 1) -> int:
            """A field that some families of mixtures do not have."""
            return size(key, minimum=minimum) if key in defaults else otherwise

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
        if family.experts is not None:
            # transformers 5 writes num_local_experts where earlier releases wrote num_experts, or n_routed_experts
            count = size("num_experts", "num_local_experts", "n_routed_experts")
            if config.get("num_local_experts") not in (None, count):
                raise BaseModelInvalid(
                    f"{path}: num_experts is {count}, but num_local_experts {config['num_local_experts']!r}; keep one"
                )
            step, first = own("decoder_sparse_step", 1), own("first_k_dense_replace", 0, minimum=0)
            without = _layer_numbers(config, "mlp_only_layers", path) if "decoder_sparse_step" in defaults else ()
            experts = Experts(
                count,
                own("moe_intermediate_size", intermediate),
                tuple(n for n in range(first, num_layers) if n not in without and (n + 1) % step == 0),
                min(count, size("num_experts_per_tok")),
                own("n_shared_experts", 0, minimum=0),
            )
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
            context_length=_context_length({**defaults, **config}),
            has_mxfp4=_has_mxfp4(config),
        )

    @property
    def family(self) -> Family:
        """What its architecture has of its own."""
        return FAMILIES[self.architecture]

    @property
    def is_multimodal(self) -> bool:
        """True for a model with a vision tower, which is served as text."""
        return self.family.is_multimodal

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

    @property
    def adapted_experts(self) -> Experts | None:
        """The experts that engines can adapt, if slots have room for LoRA on them."""
        return None if self.family.adapts_attention_only else self.experts

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
    if not FAMILIES[config["architectures"][0]].is_multimodal:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise BaseModelInvalid(f"{path}: text_config is {str(text)[:80]}; it must be an object with the text's sizes")
    return text


def _has_mxfp4(config: dict[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def name_of_module(layer: int, module: str, layers: str = _LAYERS) -> str:
    """The dotted name of a projection inside a transformers causal LM whose layers have that name."""
    block = "mlp" if module in MLP_MODULES or module == "gate_up_proj" else "self_attn"
    return f"{layers}.{layer}.{block}.{module}"


def name_of_experts(layer: int, layers: str = _LAYERS) -> str:
    """The dotted name of a layer's experts inside a transformers causal LM whose layers have that name."""
    return f"{layers}.{layer}.mlp.experts"


def _context_length(config: dict[str, Any]) -> int | None:
    """As SGLang reads it, or more: a factor that stretches positions counts even where the length includes it."""
    length, scaling = config.get("max_position_embeddings"), config.get("rope_scaling")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 < length < _MAX_SIZE:
        return None
    factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
    is_factor = isinstance(factor, (int, float)) and 1 <= factor < 1000
    return int(length * factor) if is_factor else length
