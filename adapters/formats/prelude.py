"""Read Prelude's own layout: prelude_adapter.json and adapter.safetensors (docs/adapter-formats.md)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields, is_number
from adapters.formats.lineage import KEY as LINEAGE
from adapters.formats.lineage import lineage_of
from adapters.formats.positions import stated_positions
from adapters.formats.reft_kinds import ReftKind, fold
from adapters.formats.safetensors_file import SafetensorsFile, open_safetensors
from adapters.model.base_model import MLP_MODULES, BaseModel
from adapters.model.normal_form import Adapter, ExpertFactors, LoraFactors, ReftFactors

CONFIG_NAME = "prelude_adapter.json"
WEIGHTS_STEM = "adapter"
_LAYER = r"(?P<layer>0|[1-9][0-9]{0,5})"
_LORA = re.compile(rf"lora\.{_LAYER}\.(?P<module>[a-z_]+)\.(?P<part>[AB])")
_EXPERT = re.compile(rf"lora\.{_LAYER}\.experts\.(?P<expert>0|[1-9][0-9]{{0,5}})\.(?P<module>[a-z_]+)\.(?P<part>[AB])")
_REFT = re.compile(rf"reft\.{_LAYER}\.(?P<part>A|B|W|R|bias)")
_KEYS = {"format", "base_model", "positions", "trained_positions", "lora", "reft", LINEAGE}
_REFT_PARTS: dict[ReftKind, tuple[str, ...]] = {"direft": ("A", "B", "bias"), "loreft": ("W", "R", "bias")}


def read_prelude(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """Read the adapter in normal form. Raises a subclass of AdapterError."""
    fields = Fields.read(folder, CONFIG_NAME)
    _check_header(fields, base)
    positions, trained_positions, warnings = stated_positions(fields)
    lora: dict[tuple[int, str], LoraFactors] = {}
    experts: dict[tuple[int, int, str], ExpertFactors] = {}
    reft: dict[int, ReftFactors] = {}
    with open_safetensors(folder, f"{WEIGHTS_STEM}.safetensors") as weights:
        found = _parts(weights, base)
        for section, is_in in (("lora", bool(found.lora or found.experts)), ("reft", bool(found.reft))):
            if is_in != (section in fields.values):
                raise AdapterMalformed(
                    f"{CONFIG_NAME} and the tensors disagree on whether there is {section}; have it in both"
                )
        if not found.lora and not found.experts and not found.reft:
            raise AdapterMalformed("the adapter has no tensors; save the trained adapter again")
        scale = _scale(fields, "lora")
        if scale is None and "lora" in fields.values:
            raise AdapterMalformed(f"{CONFIG_NAME}: lora must be an object with a scale")
        source = _Source(weights, base, folder)
        for (layer, module), names in sorted(found.lora.items()):
            dtype = source.check_lora(f"lora.{layer}.{module}", module, names, base.shape_of(module))
            a, b = (weights.read(names[part]) for part in "AB")
            lora[layer, module] = LoraFactors(a, b, scale or 0.0, dtype)
        for (layer, expert, module), names in sorted(found.experts.items()):
            where = f"lora.{layer}.experts.{expert}.{module}"
            dtype = source.check_lora(where, module, names, base.expert_shape_of(module))
            a, b = (weights.read_stored(names[part]) for part in "AB")
            experts[layer, expert, module] = ExpertFactors(a, b, scale or 0.0, dtype)
        scale, kind = _scale(fields, "reft", "kind"), _reft_kind(fields)
        for layer, names in sorted(found.reft.items()):
            reft[layer] = source.read_reft(f"reft.{layer}", names, kind, scale)
    warnings += lineage_of(fields)
    return Adapter(lora, reft, positions, base.fingerprint, weights.num_bytes, experts, warnings, trained_positions)


def _check_header(fields: Fields, base: BaseModel) -> None:
    if (version := fields.values.get("format")) != "prelude-adapter-1":
        raise AdapterUnsupported(f"{CONFIG_NAME}: format is {str(version)[:60]!r}; 'prelude-adapter-1' is served")
    if unknown := sorted(fields.values.keys() - _KEYS):
        raise AdapterMalformed(
            f"{CONFIG_NAME}: {unknown[0][:60]!r} is not a field; there are {', '.join(sorted(_KEYS))}"
        )
    fingerprint = fields.string("base_model", base.fingerprint)
    if fingerprint != base.fingerprint:
        raise AdapterIncompatible(
            f"{CONFIG_NAME}: base_model is {str(fingerprint)[:60]!r}, but the base model's fingerprint is "
            f"{base.fingerprint} "
            f"({base}); the adapter was made for another model"
        )


def _scale(fields: Fields, section: str, *other_keys: str) -> float | None:
    values = fields.object(section)
    if unknown := sorted(values.keys() - {"scale", *other_keys}):
        raise AdapterMalformed(f"{CONFIG_NAME}: {unknown[0][:60]!r} is not a field of {section}")
    scale = values.get("scale")
    if scale is None:
        return None
    if not (is_number(scale) and abs(scale) < 3e38):
        raise AdapterMalformed(f"{CONFIG_NAME}: {section}: the scale {str(scale)[:60]!r} must be a finite number")
    return float(scale)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Tensor names by part (A, B, …)."""

    lora: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)  # by layer, module
    experts: dict[tuple[int, int, str], dict[str, str]] = field(default_factory=dict)  # by layer, expert, module
    reft: dict[int, dict[str, str]] = field(default_factory=dict)  # by layer


def _parts(weights: SafetensorsFile, base: BaseModel) -> _Parts:
    found = _Parts()
    for tensor in weights.tensors:
        match = _LORA.fullmatch(tensor) or _EXPERT.fullmatch(tensor) or _REFT.fullmatch(tensor)
        if match is None:
            raise AdapterMalformed(
                f"tensor {tensor[:100]!r} is not known, and an adapter is never served in part; names are "
                "lora.<layer>.<module>.A, .B, lora.<layer>.experts.<expert>.<module>.A, .B and reft.<layer>.A, .B, .W, "
                ".R, .bias"
            )
        layer, part = int(match["layer"]), match["part"]
        if layer >= base.num_layers:
            raise AdapterIncompatible(
                f"tensor {tensor!r} is for layer {layer}, but the base model has layers 0 to {base.num_layers - 1} "
                f"({base})"
            )
        if match.re is _REFT:
            found.reft.setdefault(layer, {})[part] = tensor
        elif match.re is _EXPERT:
            _check_expert(match, tensor, base)
            found.experts.setdefault((layer, int(match["expert"]), match["module"]), {})[part] = tensor
        else:
            if match["module"] not in base.modules_of(layer):
                raise AdapterIncompatible(
                    f"tensor {tensor!r}: the modules of a layer such as {layer} are {', '.join(base.modules_of(layer))}"
                )
            found.lora.setdefault((layer, match["module"]), {})[part] = tensor
    return found


def _check_expert(match: re.Match[str], tensor: str, base: BaseModel) -> None:
    if base.experts is None or not base.has_experts(int(match["layer"])):
        raise AdapterIncompatible(
            f"tensor {tensor!r} is for an expert, but layer {match['layer']} of the base model ({base}) has none"
        )
    if int(match["expert"]) >= base.experts.count or match["module"] not in MLP_MODULES:
        raise AdapterIncompatible(
            f"tensor {tensor!r}: there are experts 0 to {base.experts.count - 1}, each with {', '.join(MLP_MODULES)}"
        )


def _reft_kind(fields: Fields) -> ReftKind:
    kind = fields.object("reft").get("kind", "direft")
    for known in _REFT_PARTS:
        if kind == known:
            return known
    raise AdapterUnsupported(f"{CONFIG_NAME}: reft.kind is {str(kind)[:60]!r}; {' and '.join(_REFT_PARTS)} are served")


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors, and what they must fit."""

    weights: SafetensorsFile
    base: BaseModel
    folder: AdapterFolder

    def check_lora(self, where: str, module: str, names: Mapping[str, str], size: tuple[int, int]) -> str:
        """Check A and B of a projection of `size` (out, in); return their dtype."""
        dtype = self._check_complete(where, names, ("A", "B"))
        self.folder.limits.check_modules((module,))
        rank = self._rank(where, names["A"])
        self._check_shape(names["A"], (rank, size[1]))
        self._check_shape(names["B"], (size[0], rank))
        return dtype

    def read_reft(self, where: str, names: Mapping[str, str], kind: ReftKind, scale: float | None) -> ReftFactors:
        parts = _REFT_PARTS[kind]
        dtype = self._check_complete(where, names, parts)
        rank = self._rank(where, names[parts[0]])
        for part, shape in zip(parts, ((rank, self.base.hidden), (rank, self.base.hidden), (rank,)), strict=True):
            self._check_shape(names[part], shape)
        source, projection, bias = (self.weights.read(names[part]) for part in parts)
        return fold(kind, source, projection, bias, scale, dtype, where)

    def _check_complete(self, where: str, names: Mapping[str, str], parts: tuple[str, ...]) -> str:
        if set(names) != set(parts):
            raise AdapterMalformed(f"{where} has {', '.join(sorted(names))}; it must have {', '.join(parts)}")
        return self.weights.common_dtype(names.values())

    def _rank(self, where: str, tensor: str) -> int:
        shape = self.weights.shape_of(tensor)
        if len(shape) != 2 or shape[0] < 1:
            raise AdapterMalformed(
                f"{where}: the first tensor has the shape {list(shape)}; it must be [rank, size], rank at least 1"
            )
        self.folder.limits.check_rank(shape[0], where)
        return shape[0]

    def _check_shape(self, tensor: str, expected: tuple[int, ...]) -> None:
        if (shape := self.weights.shape_of(tensor)) != expected:
            raise AdapterIncompatible(
                f"tensor {tensor!r} has the shape {list(shape)}; for this base model ({self.base}) and rank it must be "
                f"{list(expected)}"
            )
