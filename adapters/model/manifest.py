"""The canonical description of an adapter and the digest that is its revision id.

The digest depends on what the adapter computes with (kinds, positions, base model, and of every factor its place,
shape, scale, source dtype and values), on the positions that it was trained for where it is applied to others, and on
nothing else: not on file names, key spellings or the order of tensors.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np

from adapters.model.normal_form import Adapter
from adapters.model.number_ranges import Ranges, count_of, ranges_of

_DOMAIN = b"prelude adapter revision 1"
_PACKED_DOMAIN = "prelude packed revision 1"


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """One projection's LoRA."""

    layer: int
    module: str
    rank: int
    size_in: int
    size_out: int
    scale: float
    dtype: str


@dataclass(frozen=True, slots=True)
class ExpertsEntry:
    """One projection's LoRA of those experts of a layer that have the same rank, scale and dtype.

    So an adapter with thousands of equal experts has one entry per layer and projection.
    """

    layer: int
    module: str
    experts: Ranges
    rank: int
    size_in: int
    size_out: int
    scale: float
    dtype: str


@dataclass(frozen=True, slots=True)
class ReftEntry:
    """One layer's ReFT."""

    layer: int
    rank: int
    hidden: int
    scale: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of an adapter without its tensors."""

    base_model: str  # the base model's fingerprint
    kinds: tuple[str, ...]
    positions: str  # that it is applied to
    lora: tuple[LoraEntry, ...]  # by (layer, module)
    reft: tuple[ReftEntry, ...]  # by layer
    experts: tuple[ExpertsEntry, ...] = ()  # sorted by the fields in their order
    trained_positions: str | None = None  # where it is applied to others than it was trained for

    @classmethod
    def of(cls, adapter: Adapter) -> Self:
        """The manifest of an adapter."""
        return cls(
            base_model=adapter.base_fingerprint,
            kinds=adapter.kinds,
            positions=adapter.positions,
            lora=tuple(
                LoraEntry(layer, module, f.rank, f.a.shape[1], f.b.shape[0], float(f.scale), f.dtype)
                for (layer, module), f in sorted(adapter.lora.items())
            ),
            reft=tuple(
                ReftEntry(layer, f.rank, f.a.shape[1], float(f.scale), f.dtype)
                for layer, f in sorted(adapter.reft.items())
            ),
            experts=tuple(_expert_entries(adapter)),
            trained_positions=adapter.trained_positions,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse what `to_json` wrote."""
        fields = json.loads(text)
        return cls(
            base_model=fields["base_model"],
            kinds=tuple(fields["kinds"]),
            positions=fields["positions"],
            lora=tuple(LoraEntry(**entry) for entry in fields["lora"]),
            reft=tuple(ReftEntry(**entry) for entry in fields["reft"]),
            experts=tuple(
                ExpertsEntry(**{**entry, "experts": tuple((first, last) for first, last in entry["experts"])})
                for entry in fields.get("experts", ())
            ),
            trained_positions=fields.get("trained_positions"),
        )

    @property
    def max_rank(self) -> int:
        return max(entry.rank for each in (self.lora, self.reft, self.experts) for entry in each)

    @property
    def expert_rank(self) -> int:
        """The largest rank of LoRA on experts; 0 without any."""
        return max((entry.rank for entry in self.experts), default=0)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The projections that LoRA changes, in alphabetical order; those of experts as `experts.up_proj`."""
        return tuple(
            sorted({entry.module for entry in self.lora} | {f"experts.{entry.module}" for entry in self.experts})
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the adapter changes, ascending."""
        return tuple(sorted({entry.layer for each in (self.lora, self.reft, self.experts) for entry in each}))

    @property
    def num_parameters(self) -> int:
        lora = sum(entry.rank * (entry.size_in + entry.size_out) for entry in self.lora)
        lora += sum(e.rank * (e.size_in + e.size_out) * count_of(e.experts) for e in self.experts)
        return lora + sum(entry.rank * (2 * entry.hidden + 1) for entry in self.reft)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, floats in Python's shortest exact spelling.

        Keys without a value are absent, which keeps the ids of revisions that are older than these fields.
        """
        fields = asdict(self)
        for key in ("experts", "trained_positions"):
            if not fields[key]:
                del fields[key]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _expert_entries(adapter: Adapter) -> Iterator[ExpertsEntry]:
    alike: dict[tuple[int, str, int, int, int, float, str], list[int]] = {}
    for (layer, expert, module), f in sorted(adapter.experts.items()):
        size_in, size_out = f.stored_a.shape[1], f.stored_b.shape[0]
        alike.setdefault((layer, module, f.rank, size_in, size_out, float(f.scale), f.dtype), []).append(expert)
    for (layer, module, rank, size_in, size_out, scale, dtype), experts in sorted(alike.items()):
        yield ExpertsEntry(layer, module, ranges_of(experts), rank, size_in, size_out, scale, dtype)


def revision_id_of(adapter: Adapter) -> str:
    """The adapter's revision id, "sha256:" and 64 hex digits."""
    digest = hashlib.sha256()
    for part in _digested_parts(adapter):
        # The length before each part makes the sequence of parts injective.
        digest.update(part.nbytes.to_bytes(8, "little"))
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def revision_id_of_packed(manifest: str, tensors_sha256: str) -> str:
    """That of an adapter that only ever was in packed form, by the digest of its tensors there."""
    return f"sha256:{hashlib.sha256(f'{_PACKED_DOMAIN} {tensors_sha256} {manifest}'.encode()).hexdigest()}"


def _digested_parts(adapter: Adapter) -> Iterator[memoryview]:
    yield memoryview(_DOMAIN)
    yield memoryview(Manifest.of(adapter).to_json().encode())
    for _, lora in sorted(adapter.lora.items()):
        yield from (_raw(lora.a), _raw(lora.b))
    for _, reft in sorted(adapter.reft.items()):
        yield from (_raw(reft.a), _raw(reft.b), _raw(reft.bias))
    for _, expert in sorted(adapter.experts.items()):
        yield from (_raw(expert.a), _raw(expert.b))


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").reshape(-1).view(np.uint8).data
