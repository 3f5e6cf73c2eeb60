"""Fold the linear members of the ReFT family into the one form h + s B^T (A h + b).

With W, b the learned source and R the projection, [r, hidden] both:

    LoReFT, NoReFT     h + s R^T (W h + b - R h)    A = W - R   B = R
    DiReFT, NodiReFT   h + s R^T (W h + b)          A = W       B = R
    ConsReFT           h + s R^T (b - R h)          A = -R      B = R
    LobiReFT           h + s R^T b                  A = 0       B = R

NoReFT and NodiReFT have a free projection in place of a rotation; NoReFT's may have a bias of its own, which is
subtracted. (Wu et al. 2024, "ReFT: Representation Finetuning for Language Models".)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adapters.errors import AdapterMalformed
from adapters.model.normal_form import ReftFactors, frozen_array


@dataclass(frozen=True, slots=True)
class ReftKind:
    """The parts of one kind of ReFT."""

    name: str
    has_source: bool  # W
    subtracts_projection: bool  # - R h
    is_rotation: bool = True  # R is a rotation, else free


KINDS = {
    kind.name: kind
    for kind in (
        ReftKind("loreft", has_source=True, subtracts_projection=True),
        ReftKind("direft", has_source=True, subtracts_projection=False),
        ReftKind("noreft", has_source=True, subtracts_projection=True, is_rotation=False),
        ReftKind("nodireft", has_source=True, subtracts_projection=False, is_rotation=False),
        ReftKind("consreft", has_source=False, subtracts_projection=True),
        ReftKind("lobireft", has_source=False, subtracts_projection=False),
    )
}


def fold(
    kind: ReftKind,
    source: np.ndarray | None,
    projection: np.ndarray,
    bias: np.ndarray,
    scale: float,
    dtype: str,
    where: str,
) -> ReftFactors:
    """Fold the kind's parts, W and R [r, hidden] and b [r], into normal form."""
    exact = projection.astype(np.float64)
    a = np.zeros_like(exact) if source is None else source.astype(np.float64)
    if kind.subtracts_projection:
        a = a - exact
    with np.errstate(over="ignore"):
        factors = ReftFactors(frozen_array(a), frozen_array(projection), frozen_array(bias), float(scale), dtype)
    for array in (factors.a, factors.b, factors.bias):
        if not np.isfinite(array).all():
            raise AdapterMalformed(f"{where}: its values are too large for float32 once they are put together")
    return factors
