"""The router's metrics. Label values are bounded: endpoints, statuses, roles, workers and error codes."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from router.alias_split import SplitMetrics
from router.collectors import BusiestAdapters, GenAiHistograms

_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

# Kinds of management requests, by the last part of the path.
AdapterChange = Literal["import", "push", "alias", "unalias", "rollback", "delete", "restore", "prewarm", "evict"]
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
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "prelude_router_requests_total",
            "Requests answered, by HTTP status; 499: the client left.",
            ("endpoint", "status"),
        )
        self.stream_errors = counter(
            "prelude_router_stream_errors_total", "Streams that ended with an error event.", ("endpoint", "code")
        )
        self.denials = counter(
            "prelude_router_denials_total",
            "Requests refused because of who made them, by code of the error.",
            ("code",),
        )
        self.quota_refusals = counter(
            "prelude_router_quota_refusals_total",
            "Requests refused for a limit of a quota. `tenant` is other for all that cluster.yaml does not name.",
            ("tenant", "limit"),
        )
        self.quota_use = QuotaUse()
        self.registry.register(self.quota_use)
        self.tenant_tokens = counter(
            "prelude_router_tenant_tokens_total",
            "Tokens of requests that have ended, by kind: prompt, output.",
            ("tenant", "kind"),
        )
        self.quota_lease_failures = counter(
            "prelude_router_quota_lease_failures_total",
            "Attempts to share quotas with other routers at which the catalog's database did not answer.",
        )
        self.quota_routers = gauge(
            "prelude_router_quota_routers",
            "Routers that share quotas, this one included; 0: it does not share.",
        )
        self.queued = gauge("prelude_router_queued_requests", "Requests that wait for their tenant's turn.")
        self.queue_seconds = histogram(
            "prelude_router_queue_seconds",
            "How long requests waited for their tenant's turn, those that had to.",
            ("tenant",),
            buckets=_SHORT_S,
        )
        self.usage_lost = counter(
            "prelude_router_usage_requests_lost_total",
            "Requests that /v1/usage lacks: too many rows waited for the catalog's database.",
        )
        self.audit_lost = counter(
            "prelude_router_audit_events_lost_total",
            "Events that the audit log could not keep while it could not be written.",
        )
        self.in_flight = gauge("prelude_router_requests_in_flight", "Requests being served.")
        self.body_bytes = gauge("prelude_router_body_bytes", "Bodies of requests in flight.")
        self.processes = gauge("prelude_router_processes", "1 while the router runs, so that routers can be counted.")
        self.processes.set(1)
        self.connections = gauge("prelude_router_connections", "Connections of clients that are open.")
        self.refused_connections = counter(
            "prelude_router_connections_refused_total",
            "Connections that were closed for what their client did, by error code.",
            ("code",),
        )
        self.engine_connections = gauge("prelude_router_engine_connections", "Connections to engines that are open.")
        self.exhausted = counter(
            "prelude_router_exhausted_total",
            "Times that this router lacked something itself, by reason: connections to engines, or the system's error.",
            ("reason",),
        )
        self.worker_in_flight = gauge(
            "prelude_router_worker_legs_in_flight", "Engine calls in flight, by worker.", ("worker",)
        )
        self.placeable_workers = gauge("prelude_router_workers_placeable", "Workers that take requests now.", ("role",))
        self.workers = gauge(
            "prelude_router_workers",
            "Workers by state: placeable; blocked (calls to it have failed); draining; hung; not_ready; lost (its "
            "agent does not answer).",
            ("role", "state"),
        )
        self.worker_queue = gauge(
            "prelude_router_worker_queue_seconds",
            "Expected time until a worker has read the prompts that this router has placed there.",
            ("worker",),
        )
        self.worker_kv_used = gauge(
            "prelude_router_worker_kv_used_ratio",
            "Share of a worker's KV memory that is in use or promised.",
            ("worker",),
        )
        self.prefill_queue = gauge(
            "prelude_router_prefill_queue_seconds",
            "Mean of prelude_router_worker_queue_seconds, with requests that wait for their turn, without prompts that "
            "wait for memory at decode workers.",
        )
        self.decode_kv_used = gauge(
            "prelude_router_decode_kv_used_ratio",
            "Mean of prelude_router_worker_kv_used_ratio. Promises include prompts that are not read yet.",
        )
        self.decode_queue = gauge(
            "prelude_router_decode_queue_requests",
            "Sequences that wait for memory at decode workers, because others generate there.",
        )
        self.decode_load = gauge(
            "prelude_router_decode_load_ratio",
            "Share of decode workers' capacity (KV memory or sequences, whichever is fuller) that generating sequences "
            "have, in the mean; above 1 with those that wait for it.",
        )
        self.prefill_decode_ratio = gauge(
            "prelude_router_prefill_decode_ratio",
            "Prefill workers that this router's prompts of about the last minute keep busy, for each decode worker "
            "that generating sequences fill. 0 while nothing is generated. Routers add up.",
        )
        self.role_changes = counter(
            "prelude_router_role_changes_total",
            "Changes of workers' roles by this router, by result: done, refused, timed_out, lost, dry_run.",
            ("from", "to", "result"),
        )
        self.wanted_workers = gauge(
            "prelude_router_workers_wanted",
            "Workers that would be loaded to 80 % now, at most twice as many.",
            ("role",),
        )
        self.first_byte = histogram(
            "prelude_router_time_to_first_token_seconds",
            "From a request's head to its first event (streams).",
            ("endpoint",),
            buckets=_SHORT_S,
        )
        self.duration = histogram(
            "prelude_router_request_duration_seconds",
            "From a request's head to the end of its answer.",
            ("endpoint",),
            buckets=_LONG_S,
        )
        self.token_time = Histogram("token_seconds", "As below.", ("endpoint",), buckets=_GAP_S, registry=None)
        self.gen_ai = GenAiHistograms(
            {
                "request_duration": (self.duration, "As prelude_router_request_duration_seconds."),
                "time_to_first_token": (self.first_byte, "As prelude_router_time_to_first_token_seconds."),
                "time_per_output_token": (self.token_time, "Mean time per token after a stream's first."),
            }
        )
        self.registry.register(self.gen_ai)
        self.slo_requests = counter(
            "prelude_router_slo_requests_total",
            "Requests answered in full, by whether they kept the times of router.slo. Those with met=true are the "
            "goodput.",
            ("endpoint", "met"),
        )
        phase_seconds = histogram(
            "prelude_router_phase_seconds",
            "Time of a sequence in a phase, failed attempts included: admitted (waits for a worker), ensuring_adapter, "
            "waiting_first_event (queue, prompt, KV transfer), relaying.",
            ("phase", "adapted"),
            buckets=(0.001, 0.0025, *_SHORT_S),
        )
        self.phase_seconds = {
            (phase, adapted): phase_seconds.labels(phase, str(adapted).lower())
            for phase in TIMED_PHASES
            for adapted in (False, True)
        }
        self.busiest_adapters = BusiestAdapters()
        self.registry.register(self.busiest_adapters)
        self.ensure_adapter = histogram(
            "prelude_router_ensure_adapter_seconds",
            "Time until an adapter was resident on the worker that reads the prompt.",
            buckets=(0.001, 0.0025, *_SHORT_S),
        )
        self.resolutions = counter(
            "prelude_router_resolutions_total",
            "Adapter references resolved, by outcome: memory, database, not_found, invalid (the reference or the "
            "adapter's directory), unavailable (the catalog did not answer).",
            ("outcome",),
        )
        self.splits = SplitMetrics(counter, histogram, first_token_buckets=_SHORT_S, per_token_buckets=_GAP_S)
        self.catalog_staleness = gauge(
            "prelude_router_catalog_staleness_seconds",
            "Age of the names in memory: under a second while the catalog answers, infinite before its first answer.",
        )
        self.adapter_changes = counter(
            "prelude_router_adapter_changes_total",
            "Requests that manage adapters over HTTP, by kind, and by result: done, refused (4xx), "
            "failed (5xx), left (the client disconnected).",
            ("kind", "result"),
        )
        self.ensured_adapters = counter(
            "prelude_router_ensured_adapters_total",
            "EnsureAdapter calls, by outcome: resident, loaded, or the error code.",
            ("outcome",),
        )
        self.retries = counter(
            "prelude_router_retries_total", "Retries, by the error code of the failed attempt.", ("reason",)
        )
        self.aborts = counter("prelude_router_aborts_total", "Engine calls aborted.", ("role",))

    def set_workers(self, states: Mapping[tuple[str, str], int]) -> None:
        """Set the numbers of workers by (role, state), and drop all other combinations."""
        self.workers.clear()
        for (role, state), number in states.items():
            self.workers.labels(role, state).set(number)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def open_metrics_page(self) -> bytes:
        """The page with exemplars: traces of requests."""
        return openmetrics.generate_latest(self.registry)
