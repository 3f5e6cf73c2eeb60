"""Parse `adapter_config.json` of a PEFT LoRA, and refuse what is not served."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.json_file import Fields, is_integer, is_number
from adapters.formats.lineage import lineage_of
from adapters.formats.peft.names import endings
from adapters.formats.positions import stated_positions
from adapters.model.normal_form import Positions

CONFIG_NAME = "adapter_config.json"
OUR_KEY = "prelude"  # what Prelude adds to the file; peft and SGLang ignore it
_DEFAULT_RANK = _DEFAULT_ALPHA = 8  # peft's own
_MAX_RANK = 1 << 20
_MAX_NAMES = 10_000
# Of alpha_pattern: a module's name or an ending of it, whose dots can only match dots. peft writes `.*\.` before some.
_PART = r"(?:model|language_model|layers|self_attn|mlp|block_sparse_moe|experts|[0-9]+|w[123]|[a-z_]+_proj)"
_NAME = re.compile(rf"(?:\.\*\\\.)?{_PART}(?:\.{_PART})*")

# Field -> (what it is, what to do instead). Refused unless the field is empty.
_REFUSED = {
    "use_dora": ("DoRA", "train without use_dora, or merge the adapter into a model of its own"),
    "lora_bias": ("a LoRA bias", "train with lora_bias=False"),
    "modules_to_save": ("fully trained modules (modules_to_save)", "train without modules_to_save"),
    "trainable_token_indices": ("trained token embeddings", "train without trainable_token_indices"),
    "layer_replication": ("replicated layers", "train without layer_replication"),
    "alora_invocation_tokens": ("activated LoRA", "train without alora_invocation_tokens"),
    "use_qalora": ("QALoRA", "train without use_qalora"),
    "arrow_config": ("Arrow routing", "save one plain LoRA"),
    "kasa_config": ("KaSA", "train a plain LoRA"),
    "monteclora_config": ("Monte Carlo LoRA", "train a plain LoRA"),
    "velora_config": ("VeLoRA", "train a plain LoRA"),
    "use_bdlora": ("block-diagonal LoRA", "train a plain LoRA"),
    "megatron_config": ("Megatron layers", "convert the adapter to plain PEFT"),
}
_READ = frozenset({
    "peft_type", "bias", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters", "init_lora_weights", OUR_KEY,
})  # fmt: skip
# peft 0.21's other fields: of training, of what is refused above, and of its own bookkeeping.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
_HARMLESS_INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that decide what the adapter computes, beside its tensors."""

    ranks: frozenset[int]  # that modules may have
    alpha: float
    alphas: Mapping[str, tuple[int, float]]  # entry of alpha_pattern -> (its number, alpha)
    use_rslora: bool
    targets: frozenset[str] | None  # target_modules; None: an expression, all-linear, or not all of a list
    layers: frozenset[int]  # layers_to_transform; empty: all
    parameters: tuple[str, ...]  # entries of target_parameters
    positions: Positions
    trained_positions: Positions | None  # where they are others
    warnings: tuple[str, ...]  # of what Prelude adds to the file

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Raises AdapterUnsupported for what is not served, AdapterMalformed for contradictions."""
        _refuse_other_kinds(fields)
        rank, rank_pattern = fields.integer("r", _DEFAULT_RANK, minimum=1), fields.object("rank_pattern")
        if rank > _MAX_RANK:
            raise fields.wrong("r", f"an integer from 1 to {_MAX_RANK}")
        if not all(is_integer(value) and 0 < value <= _MAX_RANK for value in rank_pattern.values()):
            raise fields.wrong("rank_pattern", f"an object of integers from 1 to {_MAX_RANK}")
        ours = Fields(fields.object(OUR_KEY), f"{fields.where}: {OUR_KEY}")  # peft has no such field
        positions, trained_positions, warnings = stated_positions(ours)
        parameters = _names(fields, "target_parameters", fields.values.get("target_parameters") or [])
        return cls(
            ranks=frozenset((rank, *rank_pattern.values())),
            alpha=fields.number("lora_alpha", _DEFAULT_ALPHA),
            alphas=_alphas(fields),
            use_rslora=fields.boolean("use_rslora"),
            targets=_targets(fields, has_parameters=bool(parameters)),
            layers=frozenset(fields.integers("layers_to_transform") or ()),
            parameters=tuple(sorted(parameters)),
            positions=positions,
            trained_positions=trained_positions,
            warnings=(*warnings, *lineage_of(ours)),
        )

    def scale_of(self, key: str, rank: int) -> float:
        """s of the module `key`, such as model.layers.0.self_attn.q_proj, whose tensors have that rank."""
        names = list(endings(key))
        entries = [*names, *(rf".*\.{name}" for name in names[1:])]
        found = [self.alphas[entry] for entry in entries if entry in self.alphas]
        alpha = min(found)[1] if found else self.alpha  # of the first that names it, as in peft
        scale = float(alpha / (math.sqrt(rank) if self.use_rslora else rank))
        if abs(scale) > 3e38:  # not a float32
            raise AdapterMalformed(f"{CONFIG_NAME}: the scale of {key} is {scale}; lower lora_alpha")
        return scale


def unknown_fields(fields: Fields) -> Iterator[str]:
    """A warning for each field that may ask for another computation."""
    for key, value in sorted(fields.values.items()):
        if value and key not in _READ and key not in _WITHOUT_EFFECT and key not in _REFUSED:
            yield (
                f"{fields.where}: {key[:60]} is {str(value)[:60]}; Prelude does not know this field and computes a "
                "plain LoRA, so verify that the adapter answers as it was trained to"
            )


def _refuse_other_kinds(fields: Fields) -> None:
    peft_type = fields.string("peft_type")
    if peft_type is None:
        raise AdapterMalformed(f"{fields.where} has no peft_type; PEFT writes one, and LORA is served")
    if peft_type.upper() != "LORA":
        raise AdapterUnsupported(f"{fields.where}: peft_type is {peft_type[:60]!r}; of PEFT's methods LORA is served")
    bias = fields.string("bias") or "none"
    if bias != "none":
        raise AdapterUnsupported(
            f"{fields.where}: bias is {bias[:60]!r}; trained biases are not served, train with 'none'"
        )
    for key in ("use_dora", "lora_bias", "use_qalora"):
        fields.boolean(key)
    for key, (what, remedy) in _REFUSED.items():
        if fields.has(key):
            raise AdapterUnsupported(f"{fields.where}: {key} asks for {what}, which is not served; {remedy}")
    start = fields.values.get("init_lora_weights", True)
    if not (start is None or isinstance(start, bool) or start in _HARMLESS_INITIALISATIONS):
        raise AdapterUnsupported(
            f"{fields.where}: init_lora_weights is {str(start)[:60]!r}, which changes the base model's weights; save "
            "the adapter with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )


def _alphas(fields: Fields) -> dict[str, tuple[int, float]]:
    alphas: dict[str, tuple[int, float]] = {}
    for number, (entry, alpha) in enumerate(fields.object("alpha_pattern").items()):
        if not is_number(alpha):
            raise fields.wrong("alpha_pattern", "an object of finite numbers")
        if not _NAME.fullmatch(entry):
            raise AdapterUnsupported(
                f"{fields.where}: alpha_pattern has {entry[:80]!r}; names of modules and their endings are read, other "
                "expressions are not: name each module instead"
            )
        alphas[entry] = number, alpha
    return alphas


def _targets(fields: Fields, *, has_parameters: bool) -> frozenset[str] | None:
    modules = fields.values.get("target_modules")
    if isinstance(modules, str) and modules:
        return None
    if not modules and not has_parameters:
        raise fields.wrong("target_modules", "a list of module names, a regular expression, or 'all-linear'")
    names = _names(fields, "target_modules", modules or [])
    return None if fields.has("exclude_modules") else names


def _names(fields: Fields, key: str, names: Any) -> frozenset[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise fields.wrong(key, "a list of names")
    if len(names) > _MAX_NAMES:
        raise fields.wrong(key, f"a list of at most {_MAX_NAMES} names")
    return frozenset(names)
