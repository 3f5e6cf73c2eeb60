"""Requests of the adapter-tax benchmark: all prompts differ, adapters take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FIRST_ORDINARY_TOKEN = 16  # smaller ids are special tokens of the demo model


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `adapter` counts from 0; None is the base model."""

    prompt: Sequence[int]
    adapter: int | None


def request(seed: tuple[int, ...], number: int, num_adapters: int, num_tokens: int, vocabulary: int) -> Request:
    """Request `number` of the load with this seed; the same for every system."""
    generator = np.random.default_rng((*seed, number))
    prompt = generator.integers(_FIRST_ORDINARY_TOKEN, vocabulary, num_tokens).tolist()
    return Request(prompt, number % num_adapters if num_adapters else None)
