"""Random numbers whose values do not change with Python's version: one uniform number each, by inverse transforms."""

import math
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


class Draws:
    """One stream of random numbers. Equal words give equal numbers: `Draws(seed, "prompt", 7)`."""

    def __init__(self, *words: int | str) -> None:
        self._random = Random("/".join(map(str, words)))  # text is hashed with SHA-512: no two words give one stream

    def uniform(self) -> float:
        """In (0, 1), never 0 nor 1."""
        return (self._random.getrandbits(53) + 0.5) * 2.0**-53

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return low + int(self.uniform() * (high - low + 1))

    def exponential(self, mean: float) -> float:
        return -mean * math.log(self.uniform())

    def lognormal(self, sigma: float, loc: float, scale: float) -> float:
        """As `scipy.stats.lognorm(sigma, loc, scale)`: loc + scale * exp(sigma * z)."""
        return loc + scale * math.exp(sigma * _NORMAL.inv_cdf(self.uniform()))

    def tokens(self, count: int, first: int, last: int) -> list[int]:
        """Token ids, uniform in [first, last] up to a bias of 2^-16."""
        span = last - first + 1
        drawn = self._random.getrandbits(32 * count).to_bytes(4 * count, "little") if count else b""
        return [first + int.from_bytes(drawn[at : at + 4], "little") % span for at in range(0, 4 * count, 4)]
