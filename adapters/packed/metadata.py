"""The metadata in a packed file's header."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from adapters.errors import AdapterMalformed
from adapters.formats.json_file import Fields, is_integer, parse_object
from adapters.identity import is_revision_id
from adapters.model.normal_form import POSITIONS, Positions
from adapters.model.number_ranges import Ranges, count_of
from adapters.model.serving import EngineDtype
from adapters.packed.fused_layout import EXPERT_PARTS_OF, PARTS_OF

FORMAT = "prelude-packed-1"
DTYPE_CODES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MAX_HEADER_BYTES = 1024**2  # an engine parses it between two batches; 36,864 tensors of experts take a tenth of it
_KEYS = {"format", "revision_id", "dtype", "positions", "base_model", "lora", "reft", "sha256", "manifest"}
_EXPERTS_KEY = "experts"  # only in files with LoRA on experts
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_LAYERS = 1 << 16
_MOST_EXPERTS = 1 << 16
_MOST_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class PackedModule:
    """The layers and rows of an engine module."""

    layers: tuple[int, ...]  # ascending; the first axis of its tensors
    part_rows: tuple[int, ...]  # of B, for each projection that is fused in it


@dataclass(frozen=True, slots=True)
class PackedExpertModule:
    """The layers, experts and rows of an engine module of experts."""

    layers: tuple[int, ...]  # ascending
    experts: tuple[Ranges, ...]  # of each layer; the first axis of its tensors is over layers and, in them, experts
    part_rows: tuple[int, ...]  # of one expert's B, for each projection that is fused in it

    @property
    def count(self) -> int:
        """The number of experts, over all layers."""
        return sum(count_of(own) for own in self.experts)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """LoRA on a mixture of experts."""

    rank: int  # of every expert
    modules: Mapping[str, PackedExpertModule]  # by engine module


@dataclass(frozen=True, slots=True)
class PackedReft:
    """The layers and ranks of ReFT."""

    layers: tuple[int, ...]  # ascending; the first axis of its tensors
    ranks: tuple[int, ...]  # of each layer; what is beyond it in the tensors is zero

    @property
    def rank(self) -> int:
        return max(self.ranks)


@dataclass(frozen=True, slots=True)
class PackedMetadata:
    """A packed file's metadata, checked."""

    revision_id: str
    dtype: EngineDtype
    positions: Positions
    base_fingerprint: str
    lora_rank: int  # of every module; 0 where there is none
    modules: Mapping[str, PackedModule]  # by engine module
    reft: PackedReft | None
    tensors_sha256: str  # 64 hex digits, of everything after the header
    manifest: str  # canonical JSON (see `adapters.model.manifest`)
    experts: PackedExperts | None = None

    @property
    def rank(self) -> int:
        """The largest rank, which a slot must have room for."""
        return max(self.lora_rank, self.reft.rank if self.reft else 0, self.experts.rank if self.experts else 0)

    def to_header(self) -> dict[str, str]:
        """The safetensors `__metadata__`."""
        lora = {
            "rank": self.lora_rank,
            "modules": {
                name: {"layers": module.layers, "part_rows": module.part_rows} for name, module in self.modules.items()
            },
        }
        reft = {} if self.reft is None else {"layers": self.reft.layers, "ranks": self.reft.ranks}
        experts = {} if self.experts is None else {_EXPERTS_KEY: _to_json(self.experts)}
        return {
            "format": FORMAT,
            "revision_id": self.revision_id,
            "dtype": self.dtype,
            "positions": self.positions,
            "base_model": self.base_fingerprint,
            "lora": json.dumps(lora, separators=(",", ":")),
            "reft": json.dumps(reft, separators=(",", ":")),
            "sha256": self.tensors_sha256,
            "manifest": self.manifest,
            **experts,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], where: str) -> PackedMetadata:
        """Parse and check a `__metadata__`. Raises AdapterMalformed, naming `where`."""
        if header.get("format") != FORMAT:
            raise AdapterMalformed(
                f"{where} has the format {str(header.get('format'))[:60]!r}, not {FORMAT!r}; pack the adapter again"
            )
        if header.keys() - {_EXPERTS_KEY} != _KEYS or not all(isinstance(value, str) for value in header.values()):
            raise AdapterMalformed(
                f"{where}: __metadata__ has the keys {', '.join(sorted(map(str, header)))[:200]}; it must have exactly "
                f"{', '.join(sorted(_KEYS))}, and {_EXPERTS_KEY} where there are any, all strings"
            )

        def checked(key: str, is_right: bool, expected: str) -> str:
            if not is_right:
                raise AdapterMalformed(f"{where}: {key} is {header[key][:100]!r}; it must be {expected}")
            return header[key]

        lora_rank, modules = _lora(Fields(parse_object(header["lora"].encode(), f"{where}: lora"), f"{where}: lora"))
        reft = _reft(Fields(parse_object(header["reft"].encode(), f"{where}: reft"), f"{where}: reft"))
        experts = None
        if _EXPERTS_KEY in header:
            own = f"{where}: {_EXPERTS_KEY}"
            experts = _experts(Fields(parse_object(header[_EXPERTS_KEY].encode(), own), own))
        if not modules and reft is None and experts is None:
            raise AdapterMalformed(f"{where} has neither LoRA nor ReFT; pack the adapter again")
        # The engine's kernels step by the largest rank.
        for what, rank in (("ReFT", reft.rank if reft else 0), ("experts", experts.rank if experts else 0)):
            if modules and lora_rank < rank:
                raise AdapterMalformed(
                    f"{where}: LoRA's rank of {lora_rank} is below {what}'s of {rank}; pack the adapter again"
                )
        return cls(
            revision_id=checked("revision_id", is_revision_id(header["revision_id"]), "'sha256:' and 64 hex digits"),
            dtype=cast(
                EngineDtype, checked("dtype", header["dtype"] in DTYPE_CODES, f"one of {', '.join(DTYPE_CODES)}")
            ),
            positions=cast(Positions, checked("positions", header["positions"] in POSITIONS, " or ".join(POSITIONS))),
            base_fingerprint=checked("base_model", bool(_FINGERPRINT.fullmatch(header["base_model"])), "16 hex digits"),
            lora_rank=lora_rank,
            modules=modules,
            reft=reft,
            tensors_sha256=checked("sha256", bool(_SHA256.fullmatch(header["sha256"])), "64 hex digits"),
            manifest=header["manifest"],
            experts=experts,
        )


def _lora(fields: Fields) -> tuple[int, dict[str, PackedModule]]:
    rank = fields.integer("rank")
    given = fields.object("modules")
    modules = {}
    for name, entry in given.items():
        if name not in PARTS_OF or not isinstance(entry, dict):
            raise fields.wrong("modules", f"an object with keys of {', '.join(PARTS_OF)} and objects as values")
        own = Fields(entry, f"{fields.where}: {name}")
        part_rows = own.integers("part_rows") or ()
        if len(part_rows) != len(PARTS_OF[name]) or not all(0 < rows < _MOST_ROWS for rows in part_rows):
            raise own.wrong("part_rows", f"{len(PARTS_OF[name])} positive integers")
        modules[name] = PackedModule(_layers(own), part_rows)
    if not 0 < rank < _MOST_ROWS and not (rank == 0 and not modules):
        raise fields.wrong("rank", "a positive integer where there are modules")
    return rank, modules


def _to_json(experts: PackedExperts) -> str:
    modules = {
        name: {"layers": module.layers, "experts": module.experts, "part_rows": module.part_rows}
        for name, module in experts.modules.items()
    }
    return json.dumps({"rank": experts.rank, "modules": modules}, separators=(",", ":"))


def _experts(fields: Fields) -> PackedExperts:
    rank, modules = fields.integer("rank"), {}
    if not 0 < rank < _MOST_ROWS:
        raise fields.wrong("rank", "a positive integer")
    for name, entry in fields.object("modules").items():
        if name not in EXPERT_PARTS_OF or not isinstance(entry, dict):
            raise fields.wrong("modules", f"an object with keys of {', '.join(EXPERT_PARTS_OF)} and objects as values")
        own = Fields(entry, f"{fields.where}: {name}")
        part_rows, layers, given = own.integers("part_rows") or (), _layers(own), entry.get("experts")
        if len(part_rows) != len(EXPERT_PARTS_OF[name]) or not all(0 < rows < _MOST_ROWS for rows in part_rows):
            raise own.wrong("part_rows", f"{len(EXPERT_PARTS_OF[name])} positive integers")
        if not isinstance(given, list) or len(given) != len(layers) or not all(map(_are_ranges, given)):
            raise own.wrong("experts", f"of each of {len(layers)} layers ascending ranges of experts, [[first, last]]")
        experts = tuple(tuple((first, last) for first, last in ranges) for ranges in given)
        modules[name] = PackedExpertModule(layers, experts, part_rows)
    if not modules:
        raise fields.wrong("modules", "an object that is not empty")
    return PackedExperts(rank, modules)


def _are_ranges(value: Any) -> bool:
    """True for ascending ranges of experts that do not touch, the only spelling of a set."""
    if not isinstance(value, list) or not value:
        return False
    least = 0
    for each in value:
        if not isinstance(each, list) or len(each) != 2 or not all(is_integer(number) for number in each):
            return False
        if not least <= each[0] <= each[1] < _MOST_EXPERTS:
            return False
        least = each[1] + 2
    return True


def _reft(fields: Fields) -> PackedReft | None:
    if not fields.values:
        return None
    layers, ranks = _layers(fields), fields.integers("ranks") or ()
    if len(ranks) != len(layers) or not all(0 < rank < _MOST_ROWS for rank in ranks):
        raise fields.wrong("ranks", f"{len(layers)} positive integers")
    return PackedReft(layers, ranks)


def _layers(fields: Fields) -> tuple[int, ...]:
    layers = fields.integers("layers") or ()
    ascending = all(first < second for first, second in pairwise(layers))
    if not layers or not ascending or layers[-1] >= _MOST_LAYERS:
        raise fields.wrong("layers", f"ascending layer numbers below {_MOST_LAYERS}")
    return layers
