"""The demand for each revision: seconds of prefill per second, with exponential decay."""

from __future__ import annotations

import math
from collections import OrderedDict

_MAX_REVISIONS = 100_000
_DECAY_S = 10.0


class Demand:
    """Moving averages by revision. Revisions whose last request is the oldest are forgotten first."""

    def __init__(self, decay_s: float = _DECAY_S) -> None:
        self._decay_s = decay_s
        self._seconds: OrderedDict[str, tuple[float, float]] = OrderedDict()  # decayed seconds, when

    def observe(self, revision_id: str, seconds: float, now: float) -> None:
        decayed = self.seconds_per_s(revision_id, now) * self._decay_s
        self._seconds[revision_id] = decayed + seconds, now
        self._seconds.move_to_end(revision_id)
        if len(self._seconds) > _MAX_REVISIONS:
            self._seconds.popitem(last=False)

    def seconds_per_s(self, revision_id: str, now: float) -> float:
        found = self._seconds.get(revision_id)
        if found is None:
            return 0.0
        seconds, when = found
        return seconds * math.exp((when - now) / self._decay_s) / self._decay_s
