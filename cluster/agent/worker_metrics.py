"""Metrics of every worker's agent. The engine serves its own (`sglang:*`) on its own port."""

from prometheus_client import CollectorRegistry, Gauge

from engine.client import EngineLoad


class WorkerMetrics:
    """Gauges of one agent, labelled with its worker and role."""

    def __init__(self, worker: str, role: str) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            labelled = Gauge(f"prelude_worker_{name}", text, ("worker", "role"), registry=self.registry)
            return labelled.labels(worker, role)

        self.ready = gauge("ready", "1 while the worker takes requests")
        self.hung = gauge("hung", "1 while the engine shows no sign of life, or its threads make no progress")
        self.draining = gauge("draining", "1 while the worker finishes what it has and takes nothing new")
        self.engine_restarts = gauge("engine_restarts", "Times the agent has started its engine again")
        self.running_requests = gauge("running_requests", "Requests in the engine's running batch")
        self.queued_requests = gauge("queued_requests", "Requests waiting, bootstrapping or transferring KV")
        self.used_kv_tokens = gauge("used_kv_tokens", "Tokens that occupy KV memory")
        self.max_kv_tokens = gauge("max_kv_tokens", "Tokens that fit in KV memory")
        self.warm_pairs = gauge("warm_pairs", "Decode engines with which this prefill engine is warm")

    def observe_load(self, load: EngineLoad) -> None:
        """Publish the load that the engine reports."""
        self.running_requests.set(load.running_requests)
        self.queued_requests.set(load.queued_requests)
        self.used_kv_tokens.set(load.used_kv_tokens)
        self.max_kv_tokens.set(load.max_kv_tokens)
