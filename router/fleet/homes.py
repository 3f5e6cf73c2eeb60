"""Rendezvous hashing: each revision has its own order of the workers, which is the same at every router.

When a worker leaves, only the revisions that had it as their first home get a new first home. (Thaler and Ravishankar,
"Using name-based mappings to increase hit rates", 1998.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

MAX_HOMES = 16  # of a revision
_MAX_MEMORIZED = 65_536
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


class Homes:
    """The order of some workers for every key."""

    def __init__(self, workers: Sequence[str], max_memorized: int = _MAX_MEMORIZED) -> None:
        self._length = min(MAX_HOMES, len(workers))
        self._seeds = np.array([_hash(name) for name in workers], dtype=np.uint64)
        self.order = lru_cache(max_memorized)(self._order)

    def _order(self, key: str) -> tuple[int, ...]:
        """Indices of the workers, the key's first home first: at most MAX_HOMES."""
        scores = self._seeds ^ np.uint64(_hash(key))
        scores ^= scores >> _SHIFT_1
        scores *= _MULTIPLIER_1
        scores ^= scores >> _SHIFT_2
        scores *= _MULTIPLIER_2
        scores ^= scores >> _SHIFT_3
        return tuple(scores.argsort()[: -self._length - 1 : -1].tolist())


@lru_cache(maxsize=2)  # each may know the orders of very many keys
def homes_of(workers: tuple[str, ...]) -> Homes:
    """The Homes of these workers, cached with the orders computed so far: most fleet changes do not affect them."""
    return Homes(workers)


@lru_cache(maxsize=16)
def homes_among(workers: tuple[str, ...]) -> Homes:
    """As `homes_of`, for a part of the workers: those that can serve some adapters, or have not failed a request."""
    return Homes(workers, _MAX_MEMORIZED // 16)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
