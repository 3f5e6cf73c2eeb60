"""Preference pairs with the lengths of published data sets; their tokens are random.

Medians are those of the table "Speedups" in the code of "Accelerating Direct Preference Optimization with Prefix
Sharing" (Wang and Hegde 2024, github.com/frankxwang/dpo-prefix-sharing). Its overall length is read as that of the
prompt with both answers. Lengths are lognormal about the medians.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_SIGMA = 0.4  # of the logarithms of lengths
_SHORTEST = 8


@dataclass(frozen=True, slots=True)
class Profile:
    """Lengths of one data set, in tokens."""

    name: str
    overall: int  # median of a prompt with both answers
    ratio: float  # median of prompt to one answer

    @property
    def answer(self) -> float:
        return self.overall / (self.ratio + 2)

    @property
    def prompt(self) -> float:
        return self.answer * self.ratio


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("ultrafeedback", 409, 0.42),
        Profile("capybara", 1160, 1.59),
        Profile("hh-rlhf", 186, 2.15),
        Profile("metamath", 872, 3.91),
        Profile("helpsteer", 775, 6.34),
        Profile("tldr", 416, 11.14),
    )
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of preference data, as token ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def draw_pairs(profile: Profile, count: int, seed: int, vocabulary: int, longest: int) -> list[Pair]:
    """`count` pairs, none of which has more than `longest` tokens; the same for equal arguments."""
    generator = random.Random(f"{profile.name}/{seed}")

    def length(median: float) -> int:
        return max(_SHORTEST, round(median * generator.lognormvariate(0, _SIGMA)))

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(generator.choices(range(vocabulary), k=number))

    pairs: list[Pair] = []
    while len(pairs) < count:
        lengths = (length(profile.prompt), length(profile.answer), length(profile.answer))
        if 2 * lengths[0] + sum(lengths[1:]) <= longest:  # so that any layout has room for it
            pairs.append(Pair(*map(tokens, lengths)))
    return pairs


def median_ratio(pairs: Sequence[Pair]) -> float:
    """Of the tokens of a prompt to those of one answer."""
    ratios = sorted(2 * len(pair.prompt) / (len(pair.chosen) + len(pair.rejected)) for pair in pairs)
    return ratios[len(ratios) // 2]
