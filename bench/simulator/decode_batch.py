"""The sequences that one simulated engine generates for: every step is one token for each of them.

Nothing happens per step. While the batch stands still, all its sequences have done the same number of steps, so an
event is needed only where a sequence joins or ends. A step takes a + c * KV, and KV grows by one token per sequence and
step: the time of k steps is quadratic in k.
"""

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from bench.simulator.clock import Clock
from bench.simulator.curves import EngineTimes

T = TypeVar("T")
_ROUNDING = 1e-6  # of a step


class DecodeBatch(Generic[T]):
    """Sequences of type T. They decode together and join between two steps (`until_boundary_s`)."""

    def __init__(self, times: EngineTimes, clock: Clock, on_end: Callable[[T], None]) -> None:
        self._times, self._clock, self._on_end = times, clock, on_end
        self._steps = 0.0  # done by an imagined sequence that has always been there
        self._at_s = 0.0  # when `_steps` was right
        self._is_paused = False
        self._kv_tokens = 0.0  # of all sequences, at `_at_s`
        self._ends: list[tuple[float, int, int, T]] = []  # step of the end, number, tokens at the end, sequence
        self._numbers = count()
        self._wake_at_s = math.inf
        self.busy_s = 0.0
        self.num_steps = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def join(self, sequence: T, context_tokens: int, num_tokens: int) -> None:
        """It has so many tokens and generates so many more."""
        self._advance()
        end = self._steps + num_tokens
        heapq.heappush(self._ends, (end, next(self._numbers), context_tokens + num_tokens, sequence))
        self._kv_tokens += context_tokens
        self._schedule()

    def pause(self) -> None:
        """Prompts are read. Call it at a boundary."""
        self._advance()
        self._is_paused = True
        self._wake_at_s = math.inf

    def resume(self) -> None:
        self._at_s, self._is_paused = self._clock.now, False
        self._schedule()

    def until_boundary_s(self) -> float:
        """Until the step that runs is done."""
        if self._is_paused or not self._ends:
            return 0.0
        self._advance()
        left = math.ceil(self._steps - _ROUNDING) - self._steps
        return self._seconds(left) if left > 0 else 0.0

    def until_next_boundary_s(self) -> float:
        """The same, or the whole next step if none runs."""
        return self.until_boundary_s() or self._seconds(1.0)

    def _seconds(self, steps: float) -> float:
        base_s, growth_s = self._speed()
        return steps * (base_s + steps * growth_s)

    def _speed(self) -> tuple[float, float]:
        """k steps from now take k * (first + k * second)."""
        number, times = len(self._ends), self._times
        table = times.steps_s
        base_s = table[number] if number < len(table) else table[-1] * number / (len(table) - 1)
        return base_s + times.kv_token_s * self._kv_tokens, times.kv_token_s * number / 2

    def _advance(self) -> None:
        """To now."""
        elapsed_s = self._clock.now - self._at_s
        self._at_s = self._clock.now
        if self._is_paused or not self._ends or elapsed_s <= 0:
            return
        base_s, growth_s = self._speed()
        if growth_s > 0:
            steps = (math.sqrt(base_s * base_s + 4 * growth_s * elapsed_s) - base_s) / (2 * growth_s)
        else:
            steps = elapsed_s / base_s if base_s else 0.0
        self._steps += steps
        self.num_steps += steps
        if abs(self._steps - round(self._steps)) < _ROUNDING:
            self._steps = round(self._steps)
        self._kv_tokens += steps * len(self._ends)
        self.busy_s += elapsed_s

    def _schedule(self) -> None:
        """Wake up at the next end. An earlier wake-up that is on its way schedules again."""
        if self._is_paused or not self._ends:
            return
        delay_s = self._seconds(max(0.0, self._ends[0][0] - self._steps))
        if self._clock.now + delay_s < self._wake_at_s:
            self._wake_at_s = self._clock.now + delay_s
            self._clock.after(delay_s, self._wake, self._wake_at_s)

    def _wake(self, at_s: float) -> None:
        if at_s != self._wake_at_s:
            return
        self._wake_at_s = math.inf
        self._advance()
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + _ROUNDING:
            _, _, tokens, sequence = heapq.heappop(self._ends)
            self._kv_tokens -= tokens
            ended.append(sequence)
        if not self._ends:
            self._steps, self._kv_tokens = 0.0, 0.0
        for sequence in ended:
            self._on_end(sequence)
        self._schedule()
