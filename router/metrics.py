"""What the router measures. Every label has few values: endpoints, statuses, roles and reasons of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

# What a request to manage adapters did, by its path.
AdapterChange = Literal[
    "import", "push", "alias", "rollback", "delete", "restore", "prewarm", "pin", "unpin", "evict", "load", "unload"
]
ChangeResult = Literal["done", "refused", "failed", "left"]


class Metrics:
    """One router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "prelude_router_requests_total",
            "Requests answered, by HTTP status; 499: the client left.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.stream_errors = Counter(
            "prelude_router_stream_errors_total",
            "Streams that ended with an error event.",
            ("endpoint", "code"),
            registry=self.registry,
        )
        self.in_flight = Gauge("prelude_router_requests_in_flight", "Requests being served.", registry=self.registry)
        self.worker_in_flight = Gauge(
            "prelude_router_worker_legs_in_flight",
            "Legs sent to a worker and not ended.",
            ("worker",),
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "prelude_router_time_to_first_token_seconds",
            "From a request's head to its first event (streams).",
            ("endpoint",),
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.duration = Histogram(
            "prelude_router_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ("endpoint",),
            buckets=_LONG_S,
            registry=self.registry,
        )
        self.ensure_adapter = Histogram(
            "prelude_router_ensure_adapter_seconds",
            "Waiting for an adapter to be resident on the worker that reads the prompt.",
            buckets=(0.001, 0.0025, *_SHORT_S),
            registry=self.registry,
        )
        self.resolutions = Counter(
            "prelude_router_resolutions_total",
            "Adapter references resolved: found in memory or in the catalog's database, not found, invalid (the text "
            "or the adapter's directory), or unavailable (the catalog did not answer).",
            ("outcome",),
            registry=self.registry,
        )
        self.catalog_staleness = Gauge(
            "prelude_router_catalog_staleness_seconds",
            "Since the names in memory were known to be those of the catalog: under a second while it answers. They "
            "are served however long it is. Infinite before the first time.",
            registry=self.registry,
        )
        self.adapter_changes = Counter(
            "prelude_router_adapter_changes_total",
            "Requests that manage adapters over HTTP, by kind, the path's verb: import, push, alias (moved), rollback, "
            "delete, restore, prewarm, pin, unpin, evict, load and unload (vLLM's paths); and by result: done (where "
            "workers do it: by one of them at least), refused (4xx), failed (5xx), left (by the client, meanwhile).",
            ("kind", "result"),
            registry=self.registry,
        )
        self.adapter_change_seconds = Histogram(
            "prelude_router_adapter_change_seconds",
            "Those of prelude_router_adapter_changes_total that were done, from the request's head.",
            ("kind",),
            buckets=_LONG_S,
            registry=self.registry,
        )
        self.ensured_adapters = Counter(
            "prelude_router_ensured_adapters_total",
            "Waits for an adapter to be resident, by outcome: resident, loaded, or the code of the error.",
            ("outcome",),
            registry=self.registry,
        )
        self.retries = Counter(
            "prelude_router_retries_total",
            "Tries after a failed one, by its reason.",
            ("reason",),
            registry=self.registry,
        )
        self.aborts = Counter(
            "prelude_router_aborts_total", "Legs aborted at engines.", ("role",), registry=self.registry
        )

    def read_in_flight(self, requests: Callable[[], float]) -> None:
        """Takes the number of requests in flight from its owner whenever the page is read."""
        self.in_flight.set_function(requests)

    def read_catalog_staleness(self, staleness_s: Callable[[], float]) -> None:
        """Takes the age of what the router knows of the catalog whenever the page is read."""
        self.catalog_staleness.set_function(staleness_s)

    def changed_adapters(self, kind: AdapterChange, result: ChangeResult, seconds: float) -> None:
        """Counts a request that manages adapters and has ended after `seconds`."""
        self.adapter_changes.labels(kind, result).inc()
        if result == "done":
            self.adapter_change_seconds.labels(kind).observe(seconds)

    def page(self) -> bytes:
        return generate_latest(self.registry)
