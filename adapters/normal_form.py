"""The one form into which every adapter format is read and from which everything else is made.

With x the input of a projection and h the residual stream after a decoder layer:

    LoRA   W x + s B (A x)            A [r, in], B [out, r]
    ReFT   h + s B^T (A h + b)        A, B [r, hidden], b [r]     (DiReFT; LoReFT is folded into it)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Positions = Literal["prefill", "all"]
POSITIONS: tuple[Positions, ...] = ("prefill", "all")
FloatArray = np.ndarray  # always float32 here, C order, not writeable


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
    """A whole adapter. Its revision is a digest of exactly this (see `adapters.manifest`)."""

    lora: Mapping[tuple[int, str], LoraFactors]  # (layer, module) -> factors; fused modules are split
    reft: Mapping[int, ReftFactors]  # layer -> factors
    positions: Positions
    base_fingerprint: str
    num_file_bytes: int  # of the files it was read from

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of change in it, in alphabetical order."""
        return tuple(kind for kind, factors in (("lora", self.lora), ("reft", self.reft)) if factors)

    @property
    def max_rank(self) -> int:
        return max([f.rank for f in self.lora.values()] + [f.rank for f in self.reft.values()])


def frozen_array(array: np.ndarray) -> FloatArray:
    """The array as float32 in C order that nobody can write to."""
    result = np.ascontiguousarray(array, dtype="<f4")
    if result is array:
        result = result.view()
    result.flags.writeable = False
    return result
