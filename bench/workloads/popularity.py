"""Which adapter a session uses: a pure function of the seed and the session's number."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from bench.workloads.draws import Draws

# `skewed` is the name that sglang.bench_serving has for Punica's law; its `distinct` is our `round-robin`.
DISTRIBUTIONS = ("identical", "uniform", "zipf", "skewed", "distinct", "round-robin")

Pick = Callable[[int], int]  # session number -> adapter number, from 0


@dataclass(frozen=True, slots=True)
class Popularity:
    """One of DISTRIBUTIONS with its parameters.

    identical: adapter 0. uniform: each with the same probability. zipf: the one of rank r with a probability in
    proportion to r^-alpha. skewed: alpha times as often as the next one (Punica, SGLang). distinct: a new one each
    time, until there are no more. round-robin: in turn.
    """

    distribution: str = "round-robin"
    alpha: float = 1.0

    def __str__(self) -> str:
        has_alpha = self.distribution in ("zipf", "skewed")
        return f"{self.distribution}, alpha {self.alpha:g}" if has_alpha else self.distribution

    def chosen(self, distribution: str | None) -> Self:
        """With this distribution, if one is given, in place of its own."""
        if distribution is None:
            return self
        return replace(self, distribution=distribution, alpha=1.5 if distribution == "skewed" else self.alpha)

    def picker(self, num_adapters: int, seed: int) -> Pick:
        """The function that picks adapters, of which there is one at least."""
        match self.distribution:
            case "identical":
                return lambda _session: 0
            case "uniform":
                return lambda session: _draw(seed, session).integer(0, num_adapters - 1)
            case "zipf" | "skewed":
                cumulated = list(accumulate(self.weights(num_adapters)))
                return lambda session: _weighted(cumulated, _draw(seed, session).uniform())
            case _:  # distinct, round-robin
                return lambda session: session % num_adapters

    def weights(self, num_adapters: int) -> list[float]:
        """Relative frequencies of `zipf` and `skewed`, from the most popular adapter on."""
        if self.distribution == "zipf":
            return [(rank + 1) ** -self.alpha for rank in range(num_adapters)]
        return [self.alpha**-rank for rank in range(num_adapters)]


def _draw(seed: int, session: int) -> Draws:
    return Draws(seed, "adapter", session)


def _weighted(cumulated: Sequence[float], uniform: float) -> int:
    return min(bisect_right(cumulated, uniform * cumulated[-1]), len(cumulated) - 1)
