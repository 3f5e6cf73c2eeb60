"""The normal form: every adapter format is read into it, and everything else is made from it.

With x the input of a projection and h the residual stream after a decoder layer:

    LoRA   W x + s B (A x)            A [r, in], B [out, r]
    ReFT   h + s B^T (A h + b)        A, B [r, hidden], b [r]     (DiReFT; LoReFT is folded into it)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Positions = Literal["prefill", "all"]
POSITIONS: tuple[Positions, ...] = ("prefill", "all")
FloatArray = np.ndarray  # float32, C order, read-only


@dataclass(frozen=True, slots=True, eq=False)
class LoraFactors:
    """The low-rank change of one projection of one layer."""

    a: FloatArray  # [r, in]
    b: FloatArray  # [out, r]
    scale: float
    dtype: str  # of the source: "float32", "bfloat16" or "float16"

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFactors:
    """The low-rank change of one projection of one expert of one layer.

    Values stay in the file's dtype until they are used: an adapter has tens of thousands of these, gigabytes together.
    """

    stored_a: np.ndarray  # [r, in]: float32, float16, or bfloat16's bits as uint16; read-only
    stored_b: np.ndarray  # [out, r]
    scale: float
    dtype: str  # of the source, as for LoraFactors

    @property
    def a(self) -> FloatArray:
        """[r, in], converted at each access."""
        return widened(self.stored_a)

    @property
    def b(self) -> FloatArray:
        """[out, r], converted at each access."""
        return widened(self.stored_b)

    @property
    def rank(self) -> int:
        return self.stored_a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class ReftFactors:
    """The low-rank change of the residual stream after one layer."""

    a: FloatArray  # [r, hidden]
    b: FloatArray  # [r, hidden]
    bias: FloatArray  # [r]
    scale: float
    dtype: str

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A whole adapter. Its revision is a digest of exactly this (see `adapters.model.manifest`)."""

    lora: Mapping[tuple[int, str], LoraFactors]  # (layer, module) -> factors; fused modules are split
    reft: Mapping[int, ReftFactors]  # layer -> factors
    positions: Positions  # that it is applied to
    base_fingerprint: str
    num_file_bytes: int  # of the files it was read from
    # (layer, expert, module) -> factors: LoRA on a mixture of experts
    experts: Mapping[tuple[int, int, str], ExpertFactors] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # about the files that it was read from; not part of the revision
    trained_positions: Positions | None = None  # where it is applied to others than it was trained for

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of change, in alphabetical order."""
        return tuple(kind for kind, is_in in (("lora", self.lora or self.experts), ("reft", self.reft)) if is_in)

    @property
    def max_rank(self) -> int:
        return max(f.rank for each in (self.lora, self.experts, self.reft) for f in each.values())


def frozen_array(array: np.ndarray) -> FloatArray:
    """The array as read-only float32 in C order."""
    result = np.ascontiguousarray(array, dtype="<f4")
    if result is array:
        result = result.view()
    result.flags.writeable = False
    return result


def widened(stored: np.ndarray) -> FloatArray:
    """The values of an array in a file's dtype, as `frozen_array`. Exact."""
    return frozen_array(bfloat16_to_float32(stored) if stored.dtype == np.dtype("<u2") else stored)


def bfloat16_to_float32(raw: np.ndarray) -> np.ndarray:
    """Exact: a bfloat16 is the upper half of a float32."""
    return (raw.astype("<u4") << np.uint32(16)).view("<f4")
