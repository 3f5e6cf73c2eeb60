"""Prompt and output lengths, in tokens: pure functions of the seed and the session's number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

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


class Phase(msgspec.Struct, frozen=True):
    """A part of an open loop."""

    prompt: int  # tokens
    output: int
    requests_per_s: float
    duration_s: float

    @property
    def num_requests(self) -> int:
        return max(1, round(self.requests_per_s * self.duration_s))


class PhasedLengths(msgspec.Struct, frozen=True, tag=True):
    """A load that turns: each phase has requests of one length, at its own rate."""

    phases: tuple[Phase, ...]

    def scaled(self, factor: float) -> PhasedLengths:
        phases = (
            Phase(scaled(each.prompt, factor), scaled(each.output, factor), each.requests_per_s, each.duration_s)
            for each in self.phases
        )
        return PhasedLengths(tuple(phases))

    def of(self, seed: int, session: int) -> tuple[int, int]:
        phase = self.phases[self.phase_of(session)]
        return phase.prompt, phase.output

    def phase_of(self, session: int) -> int:
        """The number of a session's phase; after the last one's requests, of the last one."""
        ends = list(accumulate(each.num_requests for each in self.phases))
        return min(bisect_right(ends, session), len(ends) - 1)

    def due_s(self, seed: int) -> Iterator[float]:
        """When each session is due, in seconds since the start.

        Uniform in its phase, which is a Poisson process that makes exactly as many requests.
        """
        began_s, draws = 0.0, Draws(seed, "arrivals")
        for phase in self.phases:
            left_share = 1.0  # of the phase: its rest is divided by the least of so many uniform numbers as are to come
            for num_left in range(phase.num_requests, 0, -1):
                left_share *= draws.uniform() ** (1 / num_left)
                yield began_s + phase.duration_s * (1 - left_share)
            began_s += phase.duration_s


Lengths = FixedLengths | PunicaLengths | PhasedLengths
