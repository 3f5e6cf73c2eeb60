"""Parse `adapter_config.json` of a PEFT LoRA, and refuse what is not served."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.json_file import Fields, is_integer, is_number
from adapters.formats.lineage import lineage_of
from adapters.formats.peft.bounded_regex import Expressions
from adapters.formats.peft.targets import ALL_LINEAR, PLAIN_NAME, Patterns, Targets, as_targets
from adapters.formats.positions import stated_positions
from adapters.model.normal_form import Positions

CONFIG_NAME = "adapter_config.json"
OUR_KEY = "prelude"  # what Prelude adds to the file; peft and SGLang ignore it
_DEFAULT_RANK = _DEFAULT_ALPHA = 8  # peft's own
_MAX_RANK = 1 << 20
_MAX_NAMES = 10_000

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
    """The fields that decide what the adapter computes."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    targets: Targets
    parameters: tuple[str, ...]  # entries of target_parameters
    positions: Positions
    trained_positions: Positions | None  # where they are others
    warnings: tuple[str, ...]  # of what Prelude adds to the file

    @classmethod
    def parse(cls, fields: Fields) -> PeftConfig:
        """Raises AdapterUnsupported for what is not served, AdapterMalformed for contradictions."""
        _refuse_other_kinds(fields)
        rank_pattern, alpha_pattern = fields.object("rank_pattern"), fields.object("alpha_pattern")
        if not all(is_integer(value) and 0 < value <= _MAX_RANK for value in rank_pattern.values()):
            raise fields.wrong("rank_pattern", f"an object of integers from 1 to {_MAX_RANK}")
        if not all(is_number(value) for value in alpha_pattern.values()):
            raise fields.wrong("alpha_pattern", "an object of finite numbers")
        rank = fields.integer("r", _DEFAULT_RANK, minimum=1)
        if rank > _MAX_RANK:
            raise fields.wrong("r", f"an integer from 1 to {_MAX_RANK}")
        expressions = Expressions(fields.where)
        ours = Fields(fields.object(OUR_KEY), f"{fields.where}: {OUR_KEY}")  # peft has no such field
        positions, trained_positions, warnings = stated_positions(ours)
        return cls(
            rank=rank,
            alpha=fields.number("lora_alpha", _DEFAULT_ALPHA),
            use_rslora=fields.boolean("use_rslora"),
            rank_pattern=Patterns(rank_pattern, "rank_pattern", expressions),
            alpha_pattern=Patterns(alpha_pattern, "alpha_pattern", expressions),
            targets=_targets(fields, expressions),
            parameters=_parameters(fields),
            positions=positions,
            trained_positions=trained_positions,
            warnings=(*warnings, *lineage_of(ours)),
        )

    def rank_of(self, key: str) -> int:
        """The rank of the module `key`, such as model.layers.0.self_attn.q_proj."""
        return self.rank_pattern.value_for(key, self.rank)

    def _scale_with(self, rank: int, key: str) -> float:
        alpha = self.alpha_pattern.value_for(key, self.alpha)
        scale = float(alpha / (math.sqrt(rank) if self.use_rslora else rank))
        if abs(scale) > 3e38:  # not a float32
            raise AdapterMalformed(f"{self.targets.where}: the scale of {key} is {scale}; lower lora_alpha")
        return scale

    def ranks_and_scales(self, keys: Iterable[str]) -> dict[str, tuple[int, float]]:
        """(rank, s) of each module. Raises AdapterMalformed where the patterns take too long."""
        return {key: (rank := self.rank_of(key), self._scale_with(rank, key)) for key in keys}


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


def _parameters(fields: Fields) -> tuple[str, ...]:
    parameters = fields.values.get("target_parameters")
    if parameters is None:
        return ()
    if not isinstance(parameters, list) or not all(isinstance(name, str) and name for name in parameters):
        raise fields.wrong("target_parameters", "a list of parameters' names")
    if len(parameters) > _MAX_NAMES:
        raise fields.wrong("target_parameters", f"a list of at most {_MAX_NAMES} names")
    return tuple(sorted(set(parameters)))


def _targets(fields: Fields, expressions: Expressions) -> Targets:
    modules, excluded = fields.values.get("target_modules"), fields.values.get("exclude_modules")
    if modules in (None, []) and fields.has("target_parameters"):
        modules = []
    elif not modules or not as_targets(modules):
        raise fields.wrong("target_modules", "a list of module names, a regular expression, or 'all-linear'")
    if excluded and not as_targets(excluded):
        raise fields.wrong("exclude_modules", "a list of module names or a regular expression")
    for key, names in (("target_modules", modules), ("exclude_modules", excluded or ())):
        if not isinstance(names, str) and len(names) > _MAX_NAMES:
            raise fields.wrong(key, f"a list of at most {_MAX_NAMES} names")
    layers, pattern = fields.integers("layers_to_transform"), fields.strings("layers_pattern")
    if isinstance(modules, str) and (layers is not None or pattern is not None):
        raise fields.wrong("target_modules", "a list of names where layers_to_transform or layers_pattern is given")
    if pattern and layers is None:
        raise fields.wrong("layers_pattern", "absent where layers_to_transform is absent")
    if pattern and not all(PLAIN_NAME.fullmatch(name) for name in pattern if name):
        raise AdapterUnsupported(
            f"{fields.where}: layers_pattern is {str(pattern)[:80]}; names are served, no expressions"
        )
    if isinstance(modules, str):
        modules = ALL_LINEAR if modules.lower() == ALL_LINEAR else modules
    else:
        modules = tuple(sorted(set(modules)))
    return Targets(
        modules=modules,
        excluded=excluded if isinstance(excluded, str) else tuple(excluded or ()),
        layers=layers or (),
        layers_pattern=tuple(part for part in pattern or () if part),
        expressions=expressions,
        where=fields.where,
    )
