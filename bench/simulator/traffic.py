"""The requests of a simulated cluster's clients, generated from rates and distributions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_CHUNK = 65_536  # requests drawn at once


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    adapter: int | None  # a number, the most popular first; None: the base model
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Traffic:
    """Poisson arrivals, adapters by Zipf's law, lengths lognormal with these means."""

    requests_per_s: float
    duration_s: float
    num_adapters: int = 0  # 0: the base model only
    zipf: float = 1.0
    base_share: float = 0.0  # of the requests, without an adapter
    prompt_tokens: float = 512.0
    output_tokens: float = 128.0
    length_cv: float = 0.0  # standard deviation over mean, of both

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """In the order of time. Equal seeds give equal requests."""
        random, now_s = np.random.default_rng(seed), 0.0
        shares = self.shares() if self.num_adapters else None
        while True:
            times = now_s + np.cumsum(random.exponential(1 / self.requests_per_s, _CHUNK))
            if shares is None:
                adapters = np.full(_CHUNK, -1)
            else:
                adapters = np.searchsorted(shares, random.random(_CHUNK) * shares[-1], side="right")
                adapters[random.random(_CHUNK) < self.base_share] = -1
            prompts = self._lengths(random, self.prompt_tokens)
            outputs = self._lengths(random, self.output_tokens)
            now_s = float(times[-1])
            for at_s, adapter, prompt, output in zip(
                times.tolist(), adapters.tolist(), prompts.tolist(), outputs.tolist(), strict=True
            ):
                if at_s >= self.duration_s:
                    return
                yield Arrival(at_s, None if adapter < 0 else adapter, prompt, output)

    def share_of(self, adapter: int) -> float:
        """Of all requests."""
        return (1 - self.base_share) * (adapter + 1) ** -self.zipf / self._weight

    @cached_property
    def _weight(self) -> float:
        return float(self.shares()[-1])

    def shares(self) -> np.ndarray:
        """Cumulated weights of the adapters, the most popular first."""
        return np.cumsum(np.arange(1, self.num_adapters + 1, dtype=float) ** -self.zipf)

    def _lengths(self, random: np.random.Generator, mean: float) -> np.ndarray:
        if not self.length_cv:
            return np.full(_CHUNK, max(1, round(mean)))
        sigma = math.sqrt(math.log(1 + self.length_cv**2))
        drawn = mean * np.exp(sigma * random.standard_normal(_CHUNK) - sigma**2 / 2)
        return np.maximum(1, np.rint(drawn)).astype(int)
