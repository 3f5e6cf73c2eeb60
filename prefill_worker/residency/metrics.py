"""Metrics of a worker's adapters: loads, evictions, hits and what each tier holds."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LOAD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ResidencyMetrics:
    """Metrics of a worker that holds adapters. Label values are bounded: tiers, sources, stages, error codes.

    The source of a load is `store`, `disk`, `host` (in memory, but not in the engine) or `router` (pushed). Its stages
    are `room` (wait for host memory), `fetch` (store to host memory or disk, verified), `copy` (disk to host memory,
    verified), `check` (header), `receive` (from a router, the wait for room included), `engine`, and `disk_write`, off
    the critical path.
    """

    def __init__(self, registry: CollectorRegistry, worker: str, role: str) -> None:
        self._fixed = {"worker": worker, "role": role}
        fixed = tuple(self._fixed)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prelude_worker_{name}", text, (*fixed, *labels), registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"prelude_worker_{name}", text, (*fixed, *labels), registry=registry)

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
        self._gauges = {
            "adapter_tier_adapters": gauge("adapter_tier_adapters", "Adapters in a tier", "tier"),
            "adapter_tier_bytes": gauge("adapter_tier_bytes", "Bytes used or reserved in a tier", "tier"),
            "adapter_tier_budget_bytes": gauge("adapter_tier_budget_bytes", "Byte budget of a tier", "tier"),
        }
        for name, text in (
            ("resident_adapters", "Revisions that the engine can use without a load"),
            ("memory_only_adapters", "Revisions in host memory that no store has"),
            ("adapter_loads_running", "Adapters being loaded"),
            ("adapter_loads_queued", "Adapters waiting for their load or its retry"),
            ("adapter_load_waiters", "Requests waiting for an adapter"),
        ):
            self._gauges[name] = gauge(name, text)

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

    def watch(self, name: str, number: Callable[[], float], *labels: str) -> None:
        """Have a gauge call `number` at each scrape."""
        self._gauges[name].labels(*self._fixed.values(), *labels).set_function(number)
