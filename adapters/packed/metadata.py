"""The metadata in a packed file's header."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, cast

from adapters.errors import AdapterMalformed
from adapters.formats.json_file import Fields, is_integer, parse_object
from adapters.identity import is_revision_id
from adapters.model.normal_form import POSITIONS, Positions
from adapters.model.number_ranges import Ranges, count_of, numbers_in
from adapters.model.serving import EngineDtype
from adapters.packed.fused_layout import EXPERT_PARTS_OF, PARTS_OF

FORMAT = "prelude-packed-1"
CHUNKED = "prelude-packed-2"  # its digest of the tensors is that of chunks (adapters/files/digest.py)
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
    """The layers and rows of an engine module, and of a mixture's the experts.

    The first axis of its tensors is over the layers and, in them, experts.
    """

    layers: tuple[int, ...]  # ascending
    part_rows: tuple[int, ...]  # of B, for each projection that is fused in it
    experts: tuple[Ranges, ...] | None = None  # of each layer

    @property
    def count(self) -> int:
        """The size of the first axis."""
        return len(self.layers) if self.experts is None else sum(count_of(own) for own in self.experts)

    @property
    def places(self) -> list[tuple[int, ...]]:
        """(layer,) or (layer, expert), along the first axis."""
        if self.experts is None:
            return [(layer,) for layer in self.layers]
        in_layers = zip(self.layers, self.experts, strict=True)
        return [(layer, expert) for layer, own in in_layers for expert in numbers_in(own)]

    def to_json(self) -> dict[str, Any]:
        experts = {} if self.experts is None else {"experts": self.experts}
        return {"layers": self.layers, **experts, "part_rows": self.part_rows}


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """LoRA on a mixture of experts."""

    rank: int  # of every expert
    modules: Mapping[str, PackedModule]  # by engine module


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
    tensors_sha256: str  # 64 hex digits, of everything after the header, by the format
    manifest: str  # canonical JSON (see `adapters.model.manifest`)
    experts: PackedExperts | None = None
    format: str = FORMAT

    @property
    def rank(self) -> int:
        """The largest rank, which a slot must have room for."""
        return max(self.lora_rank, self.reft.rank if self.reft else 0, self.experts.rank if self.experts else 0)

    @property
    def all_modules(self) -> Iterator[tuple[str, PackedModule, int]]:
        """(name, module, rank) of each engine module, of experts too."""
        yield from ((name, module, self.lora_rank) for name, module in self.modules.items())
        if self.experts is not None:
            yield from ((name, module, self.experts.rank) for name, module in self.experts.modules.items())

    def to_header(self) -> dict[str, str]:
        """The safetensors `__metadata__`."""
        reft = {} if self.reft is None else {"layers": self.reft.layers, "ranks": self.reft.ranks}
        experts = {} if self.experts is None else {_EXPERTS_KEY: _to_json(self.experts.rank, self.experts.modules)}
        return {
            "format": self.format,
            "revision_id": self.revision_id,
            "dtype": self.dtype,
            "positions": self.positions,
            "base_model": self.base_fingerprint,
            "lora": _to_json(self.lora_rank, self.modules),
            "reft": json.dumps(reft, separators=(",", ":")),
            "sha256": self.tensors_sha256,
            "manifest": self.manifest,
            **experts,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], where: str) -> Self:
        """Parse and check a `__metadata__`. Raises AdapterMalformed, naming `where`."""
        if header.get("format") not in (FORMAT, CHUNKED):
            raise AdapterMalformed(
                f"{where} has the format {str(header.get('format'))[:60]!r}, not {FORMAT!r} or {CHUNKED!r}; pack the "
                "adapter again"
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

        def fields_of(key: str) -> Fields:
            return Fields(parse_object(header[key].encode(), f"{where}: {key}"), f"{where}: {key}")

        lora_rank, modules = _ranked_modules(fields_of("lora"), PARTS_OF)
        reft, experts = _reft(fields_of("reft")), None
        if _EXPERTS_KEY in header:
            experts = PackedExperts(*_ranked_modules(fields_of(_EXPERTS_KEY), EXPERT_PARTS_OF))
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
            format=header["format"],
        )


def _to_json(rank: int, modules: Mapping[str, PackedModule]) -> str:
    by_name = {name: module.to_json() for name, module in modules.items()}
    return json.dumps({"rank": rank, "modules": by_name}, separators=(",", ":"))


def _ranked_modules(fields: Fields, parts_of: Mapping[str, Sequence[str]]) -> tuple[int, dict[str, PackedModule]]:
    """The rank and the modules of LoRA, or of LoRA on experts, of which there must be some."""
    rank, of_experts, modules = fields.integer("rank"), parts_of is EXPERT_PARTS_OF, {}
    for name, entry in fields.object("modules").items():
        if name not in parts_of or not isinstance(entry, dict):
            raise fields.wrong("modules", f"an object with keys of {', '.join(parts_of)} and objects as values")
        own = Fields(entry, f"{fields.where}: {name}")
        part_rows, layers = own.integers("part_rows") or (), _layers(own)
        if len(part_rows) != len(parts_of[name]) or not all(0 < rows < _MOST_ROWS for rows in part_rows):
            raise own.wrong("part_rows", f"{len(parts_of[name])} positive integers")
        modules[name] = PackedModule(layers, part_rows, _experts(own, len(layers)) if of_experts else None)
    if of_experts and not modules:
        raise fields.wrong("modules", "an object that is not empty")
    if not 0 < rank < _MOST_ROWS and not (rank == 0 and not modules):
        raise fields.wrong("rank", "a positive integer where there are modules")
    return rank, modules


def _experts(fields: Fields, num_layers: int) -> tuple[Ranges, ...]:
    given = fields.values.get("experts")
    if not isinstance(given, list) or len(given) != num_layers or not all(map(_are_ranges, given)):
        raise fields.wrong("experts", f"of each of {num_layers} layers ascending ranges of experts, [[first, last]]")
    return tuple(tuple((first, last) for first, last in ranges) for ranges in given)


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
