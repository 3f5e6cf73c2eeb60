"""Fold LoReFT and DiReFT into the one form h + s B^T (A h + b).

With W, b the learned source and R the rotation, [r, hidden] both:

    LoReFT     h + s R^T (W h + b - R h)    A = W - R   B = R
    DiReFT     h + s R^T (W h + b)          A = W       B = R

(Wu et al. 2024, "ReFT: Representation Finetuning for Language Models".)
"""

import math
from typing import Literal

import numpy as np

from adapters.errors import AdapterMalformed
from adapters.model.normal_form import ReftFactors, frozen_array

ReftKind = Literal["loreft", "direft"]


def fold(
    kind: ReftKind,
    source: np.ndarray,
    rotation: np.ndarray,
    bias: np.ndarray,
    scale: float | None,
    dtype: str,
    where: str,
) -> ReftFactors:
    """Fold W and R [r, hidden] and b [r] into normal form. Without a scale, LoReFT's is 1, DiReFT's 1/sqrt(r)."""
    if scale is None:
        scale = 1.0 if kind == "loreft" else 1 / math.sqrt(len(rotation))
    a = source.astype(np.float64)
    if kind == "loreft":
        a = a - rotation.astype(np.float64)
    with np.errstate(over="ignore"):
        factors = ReftFactors(frozen_array(a), frozen_array(rotation), frozen_array(bias), float(scale), dtype)
    if not np.isfinite(factors.a).all():
        raise AdapterMalformed(f"{where}: its values are too large for float32 once they are put together")
    return factors
