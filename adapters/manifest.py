"""The canonical description of an adapter and the digest that is its revision id.

The digest depends on what the adapter computes with (kinds, positions, base model, and of every factor its place,
shape, scale, source dtype and values) and on nothing else: not on file names, key spellings or the order of tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from adapters.normal_form import Adapter

_DOMAIN = b"prelude adapter revision 1"


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
class ReftEntry:
    """One layer's ReFT."""

    layer: int
    rank: int
    hidden: int
    scale: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of an adapter without its tensors."""

    base_model: str  # the base model's fingerprint
    kinds: tuple[str, ...]
    positions: str
    lora: tuple[LoraEntry, ...]  # by (layer, module)
    reft: tuple[ReftEntry, ...]  # by layer

    @classmethod
    def of(cls, adapter: Adapter) -> Manifest:
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
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that `to_json` wrote."""
        fields = json.loads(text)
        return cls(
            base_model=fields["base_model"],
            kinds=tuple(fields["kinds"]),
            positions=fields["positions"],
            lora=tuple(LoraEntry(**entry) for entry in fields["lora"]),
            reft=tuple(ReftEntry(**entry) for entry in fields["reft"]),
        )

    @property
    def max_rank(self) -> int:
        return max([entry.rank for entry in self.lora] + [entry.rank for entry in self.reft])

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The projections that its LoRA changes, in alphabetical order."""
        return tuple(sorted({entry.module for entry in self.lora}))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it changes, ascending."""
        return tuple(sorted({entry.layer for entry in self.lora} | {entry.layer for entry in self.reft}))

    @property
    def num_parameters(self) -> int:
        lora = sum(entry.rank * (entry.size_in + entry.size_out) for entry in self.lora)
        return lora + sum(entry.rank * (2 * entry.hidden + 1) for entry in self.reft)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, floats in Python's shortest exact spelling."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)


def revision_id_of(adapter: Adapter) -> str:
    """The adapter's revision id, "sha256:" and 64 hex digits."""
    digest = hashlib.sha256()
    for part in _digested_parts(adapter):
        # The length before each part makes the sequence of parts injective.
        digest.update(part.nbytes.to_bytes(8, "little"))
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _digested_parts(adapter: Adapter) -> Iterator[memoryview]:
    yield memoryview(_DOMAIN)
    yield memoryview(Manifest.of(adapter).to_json().encode())
    for _, lora in sorted(adapter.lora.items()):
        yield from (_raw(lora.a), _raw(lora.b))
    for _, reft in sorted(adapter.reft.items()):
        yield from (_raw(reft.a), _raw(reft.b), _raw(reft.bias))


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").reshape(-1).view(np.uint8).data
