"""Metrics of a worker's adapters: loads, evictions, hits and what each tier holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LOAD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True)
class TierFigures:
    """A tier at scrape time."""

    num_adapters: int
    num_bytes: int  # including reservations
    budget_bytes: int


class ResidencyMetrics:
    """Metrics of a worker that holds adapters. Label values are bounded: tiers, sources, stages, error codes.

    The source of a load is `store`, `disk`, `host` (in memory, but not in the engine) or `router` (pushed). Its stages
    are `room` (wait for host memory), `fetch` (store to host memory or disk, verified), `copy` (disk to host memory,
    verified), `check` (header), `receive` (from a router, the wait for room included), `engine`, and `disk_write`, off
    the critical path.
    """

    def __init__(self, registry: CollectorRegistry, worker: str, role: str, max_lora: int) -> None:
        self._registry = registry
        self._fixed = {"worker": worker, "role": role}
        self._max_lora = max_lora
        fixed = tuple(self._fixed)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prelude_worker_{name}", text, (*fixed, *labels), registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            name = f"prelude_worker_{name}"
            return Histogram(name, text, (*fixed, *labels), buckets=_LOAD_BUCKETS_S, registry=registry)

        self.load_seconds = histogram(
            "adapter_load_seconds",
            "From the start of an adapter's load to its residency, without time in the queue",
        ).labels(*self._fixed.values())
        self._stages = histogram("adapter_load_stage_seconds", "Parts of adapter loads", "stage")
        self._loads = counter(
            "adapter_loads", "Attempts to load an adapter, by result: ok or a code", "source", "result"
        )
        self._evictions = counter("adapter_evictions", "Adapters evicted", "tier")
        self._disk_failures = counter(
            "adapter_disk_cache_failures", "Adapters that could not be written to the disk cache, or deleted from it"
        )
        self._hits = counter("adapter_lease_hits", "Requests that found their adapter resident").labels(
            *self._fixed.values()
        )

    def count_hit(self) -> None:
        self._hits.inc()

    def count_load(self, source: str, result: str) -> None:
        self._loads.labels(*self._fixed.values(), source, result).inc()

    def count_eviction(self, tier: str) -> None:
        self._evictions.labels(*self._fixed.values(), tier).inc()

    def count_disk_failure(self) -> None:
        self._disk_failures.labels(*self._fixed.values()).inc()

    def observe_stage(self, stage: str, seconds: float) -> None:
        self._stages.labels(*self._fixed.values(), stage).observe(seconds)

    def watch(
        self,
        tiers: Callable[[], Mapping[str, TierFigures]],
        queue: Callable[[], tuple[int, int, int]],
        num_resident: Callable[[], int],
        num_in_memory_only: Callable[[], int],
        most_recent: Callable[[int], list[str]],
        loading: Callable[[], list[str]],
    ) -> None:
        """Register gauges that are read at scrape time. `queue` returns running loads, queued loads and waiters."""
        self._registry.register(_ResidencyGauges(self._fixed, tiers, queue, num_resident, num_in_memory_only))
        self._registry.register(_LoraRequestsInfo(self._max_lora, most_recent, loading))


class _ResidencyGauges(Collector):
    def __init__(
        self,
        fixed: Mapping[str, str],
        tiers: Callable[[], Mapping[str, TierFigures]],
        queue: Callable[[], tuple[int, int, int]],
        num_resident: Callable[[], int],
        num_in_memory_only: Callable[[], int],
    ) -> None:
        self._fixed = fixed
        self._tiers = tiers
        self._queue = queue
        self._num_resident = num_resident
        self._num_in_memory_only = num_in_memory_only

    def collect(self) -> Iterable[Metric]:
        tiers = self._tiers()
        for name, text, attribute in (
            ("adapter_tier_adapters", "Adapters in a tier", "num_adapters"),
            ("adapter_tier_bytes", "Bytes used or reserved in a tier", "num_bytes"),
            ("adapter_tier_budget_bytes", "Byte budget of a tier", "budget_bytes"),
        ):
            gauge = GaugeMetricFamily(f"prelude_worker_{name}", text, labels=(*self._fixed, "tier"))
            for tier, figures in tiers.items():
                gauge.add_metric((*self._fixed.values(), tier), getattr(figures, attribute))
            yield gauge
        running, queued, waiters = self._queue()
        for name, text, value in (
            ("resident_adapters", "Revisions that the engine can use without a load", self._num_resident()),
            ("memory_only_adapters", "Revisions in host memory that no store has", self._num_in_memory_only()),
            ("adapter_loads_running", "Adapters being loaded", running),
            ("adapter_loads_queued", "Adapters waiting for their load or its retry", queued),
            ("adapter_load_waiters", "Requests waiting for an adapter", waiters),
        ):
            gauge = GaugeMetricFamily(f"prelude_worker_{name}", text, labels=tuple(self._fixed))
            gauge.add_metric(tuple(self._fixed.values()), value)
            yield gauge


class _LoraRequestsInfo(Collector):
    """`vllm:lora_requests_info`, which the Gateway API inference extension reads to find adapters near a worker.

    One series, whose value is the Unix time of its last change: readers take the series with the greatest value. Its
    labels name revision ids. `running_lora_adapters` are the most recently used resident revisions and
    `waiting_lora_adapters` those being loaded, each at most `max_lora`, the number of the engine's adapter slots.
    """

    def __init__(
        self, max_lora: int, most_recent: Callable[[int], list[str]], loading: Callable[[], list[str]]
    ) -> None:
        self._max_lora = max_lora
        self._most_recent = most_recent
        self._loading = loading
        self._shown: tuple[str, str] | None = None
        self._changed_s = 0.0

    def collect(self) -> Iterable[Metric]:
        running = ",".join(sorted(self._most_recent(self._max_lora)))
        waiting = ",".join(self._loading()[: self._max_lora])
        if self._shown != (running, waiting):
            self._shown, self._changed_s = (running, waiting), max(time.time(), self._changed_s)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Unix time of the last change of the labels: resident adapters, and adapters being loaded",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        info.add_metric((str(self._max_lora), running, waiting), self._changed_s)
        yield info
