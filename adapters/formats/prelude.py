"""Reads Prelude's own layout, prelude_adapter.json and adapter.safetensors, described in docs/adapter-formats.md."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from adapters.base_model import MODULES, BaseModel
from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder
from adapters.formats.json_file import Fields, is_number
from adapters.formats.peft_lora import check_rank, common_dtype
from adapters.formats.reft_kinds import KINDS, ReftKind, fold
from adapters.formats.weights import Weights, open_weights
from adapters.normal_form import POSITIONS, Adapter, LoraFactors, Positions, ReftFactors

CONFIG_NAME = "prelude_adapter.json"
WEIGHTS_STEM = "adapter"
_LAYER = r"(?P<layer>0|[1-9][0-9]{0,5})"
_LORA = re.compile(rf"lora\.{_LAYER}\.(?P<module>[a-z_]+)\.(?P<part>[AB])")
_REFT = re.compile(rf"reft\.{_LAYER}\.(?P<part>A|B|W|R|bias)")
_KEYS = {"format", "base_model", "positions", "lora", "reft"}
_REFT_PARTS = {"direft": ("A", "B", "bias"), "loreft": ("W", "R", "bias")}


def read_prelude(folder: AdapterFolder, base: BaseModel) -> Adapter:
    """The adapter in normal form. Raises a subclass of AdapterError."""
    fields = Fields.read(folder, CONFIG_NAME)
    positions = _check_header(fields, base)
    lora: dict[tuple[int, str], LoraFactors] = {}
    reft: dict[int, ReftFactors] = {}
    with open_weights(folder, WEIGHTS_STEM) as weights:
        lora_parts, reft_parts = _parts(weights, base)
        for section, parts in (("lora", lora_parts), ("reft", reft_parts)):
            if bool(parts) != (section in fields.values):
                raise AdapterMalformed(
                    f"{CONFIG_NAME} and the tensors disagree on whether there is {section}; have it in both"
                )
        if not lora_parts and not reft_parts:
            raise AdapterMalformed("the adapter has no tensors; save the trained adapter again")
        scales = _Scales(fields, "lora")
        for (layer, module), names in sorted(lora_parts.items()):
            scale = scales.of(f"{layer}.{module}", module)
            if scale is None:
                raise fields.wrong("lora", f"an object with a scale, or with one for {layer}.{module} in scales")
            lora[layer, module] = _read_lora(layer, module, names, weights, scale, base, folder)
        scales.check_used()
        scales, kind = _Scales(fields, "reft", ("kind",)), _reft_kind(fields)
        for layer, names in sorted(reft_parts.items()):
            reft[layer] = _read_reft(layer, names, weights, kind, scales.of(str(layer)), base, folder)
        scales.check_used()
    return Adapter(lora, reft, positions, base.fingerprint, folder.num_bytes)


def _check_header(fields: Fields, base: BaseModel) -> Positions:
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
    positions = fields.string("positions", "prefill")
    for known in POSITIONS:
        if positions == known:
            return known
    raise fields.wrong("positions", " or ".join(map(repr, POSITIONS)))


class _Scales:
    """The scales of one section: one for all, and exceptions."""

    def __init__(self, fields: Fields, section: str, other_keys: tuple[str, ...] = ()):
        values = fields.object(section)
        if unknown := sorted(values.keys() - {"scale", "scales", *other_keys}):
            raise AdapterMalformed(f"{CONFIG_NAME}: {unknown[0][:60]!r} is not a field of {section}")
        inner = Fields(values, f"{CONFIG_NAME}: {section}")
        self._default = values.get("scale")
        self._exceptions = inner.object("scales")
        for scale in (self._default, *self._exceptions.values()):
            if scale is not None and not (is_number(scale) and abs(scale) < 3e38):
                raise AdapterMalformed(f"{inner.where}: the scale {str(scale)[:60]!r} must be a finite number")
        self._unused, self._where = set(self._exceptions), inner.where

    def of(self, *names: str) -> float | None:
        """The scale under the first of the names that is an exception, else the one for all."""
        for name in names:
            if name in self._exceptions and self._exceptions[name] is not None:
                self._unused -= {name}
                return float(self._exceptions[name])
        return None if self._default is None else float(self._default)

    def check_used(self) -> None:
        """Raises AdapterMalformed for an exception that is none of the adapter's parts."""
        if self._unused:
            raise AdapterMalformed(
                f"{self._where}: scales has {min(self._unused)[:60]!r}, for which there are no tensors"
            )


def _parts(
    weights: Weights, base: BaseModel
) -> tuple[dict[tuple[int, str], dict[str, str]], dict[int, dict[str, str]]]:
    """(LoRA by layer and module, ReFT by layer), each a mapping of parts to tensor names."""
    lora: dict[tuple[int, str], dict[str, str]] = {}
    reft: dict[int, dict[str, str]] = {}
    for tensor in weights:
        match = _LORA.fullmatch(tensor) or _REFT.fullmatch(tensor)
        if match is None:
            raise AdapterMalformed(
                f"tensor {tensor[:100]!r} is not known, and an adapter is never served in part; names are "
                "lora.<layer>.<module>.A, .B and reft.<layer>.A, .B, .W, .R, .bias"
            )
        layer = int(match["layer"])
        if layer >= base.num_layers:
            raise AdapterIncompatible(
                f"tensor {tensor!r} is for layer {layer}, but the base model has layers 0 to {base.num_layers - 1} "
                f"({base})"
            )
        if match.re is _LORA:
            if match["module"] not in MODULES:
                raise AdapterIncompatible(f"tensor {tensor!r}: the modules of a layer are {', '.join(MODULES)}")
            lora.setdefault((layer, match["module"]), {})[match["part"]] = tensor
        else:
            reft.setdefault(layer, {})[match["part"]] = tensor
    return lora, reft


def _read_lora(
    layer: int,
    module: str,
    names: Mapping[str, str],
    weights: Weights,
    scale: float,
    base: BaseModel,
    folder: AdapterFolder,
) -> LoraFactors:
    where = f"lora.{layer}.{module}"
    _check_complete(where, names, ("A", "B"))
    if module not in folder.limits.target_modules:
        raise AdapterIncompatible(
            f"the adapter changes {module}, but this deployment adapts {', '.join(folder.limits.target_modules)}"
        )
    size_out, size_in = base.shape_of(module)
    rank = _rank(where, weights.shape_of(names["A"]), folder)
    _check_shape(names["A"], weights, (rank, size_in), base)
    _check_shape(names["B"], weights, (size_out, rank), base)
    a, b = (weights.files[names[part]].read(names[part]) for part in ("A", "B"))
    return LoraFactors(a, b, scale, _dtype(names, weights))


def _reft_kind(fields: Fields) -> ReftKind:
    kind = fields.object("reft").get("kind", "direft")
    if not isinstance(kind, str) or kind not in _REFT_PARTS:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: reft.kind is {str(kind)[:60]!r}; {' and '.join(_REFT_PARTS)} are served"
        )
    return KINDS[kind]


def _read_reft(
    layer: int, names: Mapping[str, str], weights: Weights, kind: ReftKind, scale: float | None, base: BaseModel,
    folder: AdapterFolder,
) -> ReftFactors:  # fmt: skip
    where, parts = f"reft.{layer}", _REFT_PARTS[kind.name]
    _check_complete(where, names, parts)
    rank = _rank(where, weights.shape_of(names[parts[0]]), folder)
    for part, shape in zip(parts, ((rank, base.hidden), (rank, base.hidden), (rank,)), strict=True):
        _check_shape(names[part], weights, shape, base)
    source, projection, bias = (weights.files[names[part]].read(names[part]) for part in parts)
    if scale is None:
        scale = 1.0 if kind.subtracts_projection else 1 / float(np.sqrt(rank))
    return fold(kind, source, projection, bias, scale, _dtype(names, weights), where)


def _check_complete(where: str, names: Mapping[str, str], parts: tuple[str, ...]) -> None:
    if set(names) != set(parts):
        raise AdapterMalformed(f"{where} has {', '.join(sorted(names))}; it must have {', '.join(parts)}")


def _rank(where: str, shape: tuple[int, ...], folder: AdapterFolder) -> int:
    if len(shape) != 2 or shape[0] < 1:
        raise AdapterMalformed(
            f"{where}: the first tensor has the shape {list(shape)}; it must be [rank, size], rank at least 1"
        )
    check_rank(shape[0], where, folder)
    return shape[0]


def _check_shape(tensor: str, weights: Weights, expected: tuple[int, ...], base: BaseModel) -> None:
    if (shape := weights.shape_of(tensor)) != expected:
        raise AdapterIncompatible(
            f"tensor {tensor!r} has the shape {list(shape)}; for this base model ({base}) and rank it must be "
            f"{list(expected)}"
        )


def _dtype(names: Mapping[str, str], weights: Weights) -> str:
    return common_dtype(*(weights.files[tensor].dtype_of(tensor) for tensor in names.values()))
