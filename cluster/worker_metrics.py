"""What an agent shows on /metrics. The engine's own metrics (`sglang:*`) are on the engine's port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from engine.client import EngineLoad

_LOAD_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class WorkerMetrics:
    """One agent's metrics, all labelled with its worker and role."""

    def __init__(self, worker: str, role: str) -> None:
        self.registry = CollectorRegistry()
        fixed = {"worker": worker, "role": role}

        def labelled(metric):
            return metric.labels(*fixed.values())

        def gauge(name: str, text: str) -> Gauge:
            return labelled(Gauge(f"prelude_worker_{name}", text, tuple(fixed), registry=self.registry))

        self.ready = gauge("ready", "1 while the worker takes requests")
        self.engine_restarts = gauge("engine_restarts", "Times the agent has started its engine again")
        self.running_requests = gauge("running_requests", "Requests in the engine's running batch")
        self.queued_requests = gauge("queued_requests", "Requests waiting, bootstrapping or transferring KV")
        self.used_kv_tokens = gauge("used_kv_tokens", "Tokens that occupy KV memory")
        self.max_kv_tokens = gauge("max_kv_tokens", "Tokens that fit in KV memory")
        self.warm_pairs = gauge("warm_pairs", "Decode engines with which this prefill engine is warm")
        self.resident_adapters = gauge("resident_adapters", "Revisions that the engine can use at once")
        self.adapter_load_seconds = labelled(
            Histogram(
                "prelude_worker_adapter_load_seconds",
                "From the first request for a revision to its residency",
                tuple(fixed),
                buckets=_LOAD_BUCKETS_S,
                registry=self.registry,
            )
        )
        self._load_failures = Counter(
            "prelude_worker_adapter_load_failures",
            "Adapter loads that failed, by error code",
            (*fixed, "code"),
            registry=self.registry,
        )
        self._fixed = tuple(fixed.values())

    def count_load_failure(self, code: str) -> None:
        """One adapter could not be loaded."""
        self._load_failures.labels(*self._fixed, code).inc()

    def observe_load(self, load: EngineLoad) -> None:
        """Take over what the engine says of its queues and memory."""
        self.running_requests.set(load.running_requests)
        self.queued_requests.set(load.queued_requests)
        self.used_kv_tokens.set(load.used_kv_tokens)
        self.max_kv_tokens.set(load.max_kv_tokens)
