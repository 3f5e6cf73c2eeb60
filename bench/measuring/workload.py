"""What the adapter-tax benchmark sends: prompts that are all different, adapters in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FIRST_ORDINARY_TOKEN = 16  # below are markers of the demo model's chat template


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `adapter` counts from 0; None is the base model."""

    prompt: Sequence[int]
    adapter: int | None


def request(seed: tuple[int, ...], number: int, num_adapters: int, num_tokens: int, vocabulary: int) -> Request:
    """Request `number` of the load that the seed names: the same for every system that is measured with it."""
    generator = np.random.default_rng((*seed, number))
    prompt = generator.integers(_FIRST_ORDINARY_TOKEN, vocabulary, num_tokens).tolist()
    return Request(prompt, number % num_adapters if num_adapters else None)
