"""Limits of a deployment on adapters."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.model.base_model import MODULES


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that are checked before and while an adapter is read."""

    max_rank: int = 64
    max_bytes: int = 2 * 1024**3  # of all weight files together
    target_modules: tuple[str, ...] = MODULES  # the projections that the engine can adapt
    max_expert_rank: int = 0  # of LoRA on experts that workers accept; an import takes any
    serves_all_positions: bool = True  # there is a unified worker
