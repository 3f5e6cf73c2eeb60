"""Prompt and output lengths, in tokens: pure functions of the seed and the session's number."""

from __future__ import annotations

import msgspec

from bench.workloads.draws import Draws


def scaled(count: int, factor: float) -> int:
    """So many tokens or words in an edition of another size, at least one."""
    return max(1, round(count * factor))


class FixedLengths(msgspec.Struct, frozen=True, tag=True):
    """Every request the same."""

    prompt: int
    output: int

    def scaled(self, factor: float) -> FixedLengths:
        return FixedLengths(scaled(self.prompt, factor), scaled(self.output, factor))

    def of(self, seed: int, session: int) -> tuple[int, int]:
        return self.prompt, self.output


class PunicaLengths(msgspec.Struct, frozen=True, tag=True):
    """Prompts lognormal(0.8, -1, 18) clipped to [1, L - 2]; prompt + output uniform in [prompt + 2, L]."""

    max_total: int = 2048

    def scaled(self, factor: float) -> PunicaLengths:
        """The same law of prompts, cut off earlier."""
        return PunicaLengths(max(4, scaled(self.max_total, factor)))

    def of(self, seed: int, session: int) -> tuple[int, int]:
        draws = Draws(seed, "lengths", session)
        prompt = min(max(int(draws.lognormal(0.8, -1, 18)), 1), self.max_total - 2)
        return prompt, draws.integer(prompt + 2, self.max_total) - prompt


Lengths = FixedLengths | PunicaLengths
