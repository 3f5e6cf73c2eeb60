"""How fast a worker reads prompts."""

from __future__ import annotations

_MAX_BUSY_S = 20.0  # observations are halved at this age, so that a rate follows its worker


class ReadingRate:
    """A moving average of seconds per prompt token, while there are prompts to read."""

    __slots__ = ("_busy_s", "_tokens", "s_per_token")

    def __init__(self, busy_s: float = 0.0, tokens: float = 0.0) -> None:
        """The arguments are an observation to begin with."""
        self._busy_s, self._tokens = busy_s, tokens
        self.s_per_token = busy_s / tokens if tokens else 0.0  # 0: nothing was observed

    def observe(self, busy_s: float, tokens: float) -> None:
        self._busy_s += busy_s
        self._tokens += tokens
        if self._busy_s > _MAX_BUSY_S:
            self._busy_s /= 2
            self._tokens /= 2
        # A worker that has read next to nothing must not look infinitely slow.
        self._tokens = max(self._tokens, self._busy_s)
        self.s_per_token = self._busy_s / self._tokens if self._tokens else 0.0

    def fade(self, share: float) -> None:
        """Keep a share of the weight of all observations so far."""
        self._busy_s *= share
        self._tokens *= share

    def blended(self, busy_s: float, s_per_token: float, share: float) -> float:
        """The rate with one more observation, of `busy_s` at `s_per_token`, and `share` of the weight of its own."""
        return (share * self._busy_s + busy_s) / (share * self._tokens + busy_s / s_per_token)


class ReportedReading:
    """Seconds per prompt token that is not in the prefix cache, by the counts in an engine's reports."""

    __slots__ = ("_at", "_rate", "_tokens", "_us")

    def __init__(self) -> None:
        self._rate = ReadingRate()
        self._tokens = self._us = 0
        self._at = 0.0  # when the counts last changed

    @property
    def s_per_token(self) -> float:
        """0: unknown."""
        return self._rate.s_per_token

    def report(self, now: float, tokens: int, us: int) -> None:
        """Take over counts since the engine's start. The first ones only say where to count from."""
        if tokens == self._tokens:
            return
        if 0 < self._tokens < tokens:
            # An engine prepares a batch while it computes the one before, and counts that time twice.
            self._rate.observe(min((us - self._us) / 1e6, now - self._at), tokens - self._tokens)
        self._tokens, self._us, self._at = tokens, us, now
