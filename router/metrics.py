"""The router's metrics. Label values are bounded: endpoints, statuses, roles, workers and error codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.collectors import BusiestAdapters, LoopHistogram

_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

# Kinds of management requests, by the last part of the path.
AdapterChange = Literal[
    "import", "push", "alias", "rollback", "delete", "restore", "prewarm", "pin", "unpin", "evict", "load", "unload"
]
ChangeResult = Literal["done", "refused", "failed", "left"]

# Of a sequence, as on /debug/requests. `placed` and `done` take no time.
TIMED_PHASES = ("admitted", "ensuring_adapter", "waiting_first_event", "relaying")
# Of a worker, as this router sees it. Each worker is in one.
WORKER_STATES = ("placeable", "blocked", "draining", "hung", "not_ready", "lost")


class QuotaUse(Collector):
    """Tenants' use of their quotas, read at every scrape."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[tuple[str, str], float]] = dict  # by (tenant, limit)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        text = "Share of a tenant's limit that is used at this router: 1 refuses. Of `other`, the most of any tenant."
        family = GaugeMetricFamily("prelude_router_quota_used_ratio", text, labels=("tenant", "limit"))
        for labels, share in sorted(self.read().items()):
            family.add_metric(labels, share)
        yield family


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
        self.denials = Counter(
            "prelude_router_denials_total",
            "Requests refused because of who made them, by code of the error.",
            ("code",),
            registry=self.registry,
        )
        self.quota_refusals = Counter(
            "prelude_router_quota_refusals_total",
            "Requests refused for a limit of a quota. `tenant` is other for all that cluster.yaml does not name.",
            ("tenant", "limit"),
            registry=self.registry,
        )
        self.quota_use = QuotaUse()
        self.registry.register(self.quota_use)
        self.tenant_tokens = Counter(
            "prelude_router_tenant_tokens_total",
            "Tokens of requests that have ended, by kind: prompt, output. Counted where there are quotas.",
            ("tenant", "kind"),
            registry=self.registry,
        )
        self.quota_lease_failures = Counter(
            "prelude_router_quota_lease_failures_total",
            "Attempts to share quotas with other routers at which the catalog's database did not answer.",
            registry=self.registry,
        )
        self.quota_routers = Gauge(
            "prelude_router_quota_routers",
            "Routers, and processes of routers, that share quotas, this one included; 0: it does not share.",
            registry=self.registry,
        )
        self.queued = Gauge(
            "prelude_router_queued_requests", "Requests that wait for their tenant's turn.", registry=self.registry
        )
        self.queue_seconds = Histogram(
            "prelude_router_queue_seconds",
            "How long requests waited for their tenant's turn, those that had to.",
            ("tenant",),
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.audit_lost = Counter(
            "prelude_router_audit_events_lost_total",
            "Events that the audit log could not keep while it could not be written.",
            registry=self.registry,
        )
        self.in_flight = Gauge("prelude_router_requests_in_flight", "Requests being served.", registry=self.registry)
        self.body_bytes = Gauge("prelude_router_body_bytes", "Bodies of requests in flight.", registry=self.registry)
        self.processes = Gauge(
            "prelude_router_processes", "Processes of this router whose metrics are added up.", registry=self.registry
        )
        self.processes.set(1)
        self.connections = Gauge(
            "prelude_router_connections", "Connections of clients that are open.", registry=self.registry
        )
        self.refused_connections = Counter(
            "prelude_router_connections_refused_total",
            "Connections that were closed for what their client did, by error code.",
            ("code",),
            registry=self.registry,
        )
        self.engine_connections = Gauge(
            "prelude_router_engine_connections", "Connections to engines that are open.", registry=self.registry
        )
        self.exhausted = Counter(
            "prelude_router_exhausted_total",
            "Times that this router lacked something itself, by reason: connections to engines, or the system's error.",
            ("reason",),
            registry=self.registry,
        )
        self.worker_in_flight = Gauge(
            "prelude_router_worker_legs_in_flight",
            "Engine calls in flight, by worker.",
            ("worker",),
            registry=self.registry,
        )
        self.placeable_workers = Gauge(
            "prelude_router_workers_placeable",
            "Workers that take requests now.",
            ("role",),
            registry=self.registry,
        )
        self.workers = Gauge(
            "prelude_router_workers",
            "Workers by state: placeable; blocked (calls to it have failed); draining; hung; not_ready; lost (its "
            "agent does not answer).",
            ("role", "state"),
            registry=self.registry,
        )
        self.worker_queue = Gauge(
            "prelude_router_worker_queue_seconds",
            "Expected time until a worker has read the prompts that this router has placed there.",
            ("worker",),
            registry=self.registry,
        )
        self.worker_kv_used = Gauge(
            "prelude_router_worker_kv_used_ratio",
            "Share of a worker's KV memory that is in use or promised.",
            ("worker",),
            registry=self.registry,
        )
        self.prefill_queue = Gauge(
            "prelude_router_prefill_queue_seconds",
            "Mean of prelude_router_worker_queue_seconds without prompts that wait for room at decode workers: more "
            "workers that read prompts would shorten it.",
            registry=self.registry,
        )
        self.decode_kv_used = Gauge(
            "prelude_router_decode_kv_used_ratio",
            "Mean of prelude_router_worker_kv_used_ratio. Promises include prompts that are not read yet.",
            registry=self.registry,
        )
        self.decode_queue = Gauge(
            "prelude_router_decode_queue_requests",
            "Sequences that wait for room at decode workers, because others generate there.",
            registry=self.registry,
        )
        self.decode_load = Gauge(
            "prelude_router_decode_load_ratio",
            "Share of decode workers' room (KV memory or sequences, whichever is fuller) that generating sequences "
            "have, in the mean; above 1 with those that wait for it: more decode workers would lower it.",
            registry=self.registry,
        )
        self.prefill_decode_ratio = Gauge(
            "prelude_router_prefill_decode_ratio",
            "Prefill workers that this router's prompts of about the last minute keep busy, for each decode worker "
            "that generating sequences fill. 0 while nothing is generated. Routers add up.",
            registry=self.registry,
        )
        self.first_byte = LoopHistogram(
            "prelude_router_time_to_first_token_seconds",
            "From a request's head to its first event (streams).",
            ("endpoint",),
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.duration = LoopHistogram(
            "prelude_router_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ("endpoint",),
            buckets=_LONG_S,
            registry=self.registry,
        )
        self.event_gap = LoopHistogram(
            "prelude_router_event_gap_seconds",
            "Mean time between the events of a stream after its first: one value per stream that ended well. An event "
            "is a token, or several.",
            ("endpoint",),
            buckets=_GAP_S,
            registry=self.registry,
        )
        self.slo_requests = Counter(
            "prelude_router_slo_requests_total",
            "Requests answered in full, by whether they kept the times of router.slo. Those with met=true are the "
            "goodput.",
            ("endpoint", "met"),
            registry=self.registry,
        )
        phase_seconds = LoopHistogram(
            "prelude_router_phase_seconds",
            "Time of a sequence in a phase, failed attempts included: admitted (waits for a worker), ensuring_adapter, "
            "waiting_first_event (queue, prompt, KV transfer), relaying. adapted: whether it has an adapter.",
            ("phase", "adapted"),
            buckets=(0.001, 0.0025, *_SHORT_S),
            registry=self.registry,
        )
        self.phase_seconds = {
            (phase, adapted): phase_seconds.labels(phase, str(adapted).lower())
            for phase in TIMED_PHASES
            for adapted in (False, True)
        }
        self.busiest_adapters = BusiestAdapters()
        self.registry.register(self.busiest_adapters)
        self.ensure_adapter = LoopHistogram(
            "prelude_router_ensure_adapter_seconds",
            "Time until an adapter was resident on the worker that reads the prompt.",
            buckets=(0.001, 0.0025, *_SHORT_S),
            registry=self.registry,
        )
        self.resolutions = Counter(
            "prelude_router_resolutions_total",
            "Adapter references resolved, by outcome: memory, database, not_found, invalid (the reference or the "
            "adapter's directory), unavailable (the catalog did not answer).",
            ("outcome",),
            registry=self.registry,
        )
        self.catalog_staleness = Gauge(
            "prelude_router_catalog_staleness_seconds",
            "Age of the names in memory: under a second while the catalog answers, infinite before its first answer. "
            "Names are served at any age.",
            registry=self.registry,
        )
        self.adapter_changes = Counter(
            "prelude_router_adapter_changes_total",
            "Requests that manage adapters over HTTP, by kind: import, push, alias (moved), rollback, delete, restore, "
            "prewarm, pin, unpin, evict, load and unload (vLLM's paths); and by result: done (by at least one worker, "
            "if workers do it), refused (4xx), failed (5xx), left (the client disconnected).",
            ("kind", "result"),
            registry=self.registry,
        )
        self.adapter_change_seconds = Histogram(
            "prelude_router_adapter_change_seconds",
            "Duration of the requests in prelude_router_adapter_changes_total with the result done.",
            ("kind",),
            buckets=_LONG_S,
            registry=self.registry,
        )
        self.ensured_adapters = Counter(
            "prelude_router_ensured_adapters_total",
            "EnsureAdapter calls, by outcome: resident, loaded, or the error code.",
            ("outcome",),
            registry=self.registry,
        )
        self.retries = Counter(
            "prelude_router_retries_total",
            "Retries, by the error code of the failed attempt.",
            ("reason",),
            registry=self.registry,
        )
        self.aborts = Counter("prelude_router_aborts_total", "Engine calls aborted.", ("role",), registry=self.registry)

    def read_in_flight(self, requests: Callable[[], float]) -> None:
        """Read the number of requests in flight from its owner at every scrape."""
        self.in_flight.set_function(requests)

    def read_body_bytes(self, num_bytes: Callable[[], float]) -> None:
        """As `read_in_flight`, for the bytes of their bodies."""
        self.body_bytes.set_function(num_bytes)

    def set_workers(self, states: Mapping[tuple[str, str], int]) -> None:
        """Set the numbers of workers by (role, state), and drop all other combinations."""
        self.workers.clear()
        for (role, state), number in states.items():
            self.workers.labels(role, state).set(number)

    def set_saturation(
        self,
        num_placeable: Mapping[str, int],
        queue_s: Mapping[str, float],
        kv_used: Mapping[str, float],
        *,
        prefill_queue_s: float,
        decode_kv_used: float,
        decode_queue: float,
        decode_load: float,
        prefill_decode_ratio: float,
    ) -> None:
        """Set the fleet's saturation: workers by role, two values per worker, and the pools' values."""
        for role, number in num_placeable.items():
            self.placeable_workers.labels(role).set(number)
        for gauge, values in ((self.worker_queue, queue_s), (self.worker_kv_used, kv_used)):
            gauge.clear()
            for worker, value in values.items():
                gauge.labels(worker).set(value)
        self.decode_kv_used.set(decode_kv_used)
        self.prefill_queue.set(prefill_queue_s)
        self.decode_queue.set(decode_queue)
        self.decode_load.set(decode_load)
        self.prefill_decode_ratio.set(prefill_decode_ratio)

    def read_catalog_staleness(self, staleness_s: Callable[[], float]) -> None:
        """Read the catalog's staleness from its owner at every scrape."""
        self.catalog_staleness.set_function(staleness_s)

    def changed_adapters(self, kind: AdapterChange, result: ChangeResult, seconds: float) -> None:
        """Count a management request that took `seconds`."""
        self.adapter_changes.labels(kind, result).inc()
        if result == "done":
            self.adapter_change_seconds.labels(kind).observe(seconds)

    def page(self) -> bytes:
        return generate_latest(self.registry)
