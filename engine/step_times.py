"""How long adapters kept the scheduler from its next batch: loading one, filling a slot. On the engine's /metrics."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Count the time inside. Work that a GPU is given counts until it is given, not until it is done."""
    began_at = time.perf_counter()
    try:
        yield
    finally:
        _histogram().labels(step).observe(time.perf_counter() - began_at)


@functools.cache
def _histogram() -> Any:
    # Imported at the first step: by then SGLang has said where the processes of its server bring metrics together.
    from prometheus_client import Histogram

    what = "Time for which adapters kept the scheduler from its next batch"
    return Histogram("prelude_engine_adapter_step_seconds", what, ["step"], buckets=_BUCKETS_S)
