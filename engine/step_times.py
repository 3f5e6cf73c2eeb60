"""Metric, on the engine's /metrics: how long adapter loads and slot fills delay the scheduler's next batch."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

METRIC = "prelude_engine_adapter_step_seconds"
TEXT = "Delay of the scheduler's next batch by an adapter's step: load, fill of a slot, clear"
LABELS = ("step",)
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Record how long the block takes. GPU work counts until it is enqueued, not until it is done."""
    began_at = time.perf_counter()
    try:
        yield
    finally:
        _histogram().labels(step).observe(time.perf_counter() - began_at)


@functools.cache
def _histogram() -> Any:
    # Imported at first use: by then SGLang has set prometheus_client's multiprocess directory.
    from prometheus_client import Histogram

    return Histogram(METRIC, TEXT, LABELS, buckets=_BUCKETS_S)
