"""Every metric that dashboards, alerts and docs may name, as the code declares it.

Prelude's own come from its live registries, so a metric that is renamed there is gone here, and what names it fails its
test. Those of SGLang and Prometheus are listed, with what we use of them; a test holds them to SGLang's source.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from cluster.agent.worker_metrics import WorkerMetrics
from engine import step_times
from prefill_worker.residency.metrics import ResidencyMetrics
from process.certificates.expiry import METRIC, START_METRIC, Validity, export_expiry
from router.metrics import Metrics
from training.service.metrics import TrainerMetrics

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_ENGINE = ("model_name", "engine_type")
_SCHEDULER = (*_ENGINE, "tp_rank", "pp_rank", "moe_ep_rank")


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric."""

    name: str  # without the suffixes of its samples
    kind: str  # counter, gauge or histogram
    labels: tuple[str, ...]
    text: str
    source: str  # whose /metrics has it: router, agent, engine, trainer, or prometheus itself
    # Why a healthy cluster under load may not have it; empty: it always has it.
    absent_until: str = ""

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its series."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])


def _sglang(name: str, kind: str, labels: tuple[str, ...], text: str, absent_until: str = "") -> MetricInfo:
    return MetricInfo(f"sglang:{name}", kind, labels, text, "engine", absent_until)


# What we use of what SGLang exports with --enable-metrics.
SGLANG = (
    _sglang("realtime_tokens", "counter", (*_SCHEDULER, "mode"), "Tokens: prefill_compute, prefill_cache, decode"),
    _sglang("inter_token_latency_seconds", "histogram", _ENGINE, "Time between two tokens of a stream"),
    _sglang("queue_time_seconds", "histogram", _SCHEDULER, "Wait in the scheduler's queue"),
    _sglang("per_stage_req_latency_seconds", "histogram", (*_SCHEDULER, "stage"), "Time of a request in a stage"),
    _sglang("kv_transfer_latency_ms", "histogram", _SCHEDULER, "KV transfer of a request, in milliseconds"),
    _sglang("kv_transfer_total_mb", "histogram", _SCHEDULER, "KV sent for a request, in MB"),
    _sglang("num_queue_reqs", "gauge", _SCHEDULER, "Requests in the scheduler's queue"),
    _sglang("num_prefill_bootstrap_queue_reqs", "gauge", _SCHEDULER, "Requests that wait for their decode engine"),
    _sglang("num_prefill_inflight_queue_reqs", "gauge", _SCHEDULER, "Requests whose KV is being sent"),
    _sglang("num_decode_prealloc_queue_reqs", "gauge", _SCHEDULER, "Requests that wait for KV memory at decode"),
    _sglang("num_decode_transfer_queue_reqs", "gauge", _SCHEDULER, "Requests whose KV is being received"),
    _sglang(
        "num_retracted_requests", "counter", _SCHEDULER, "Requests put back for lack of KV memory", "one is put back"
    ),
    _sglang("num_transfer_failed_reqs", "counter", _SCHEDULER, "KV transfers that failed", "one fails"),
    _sglang("num_bootstrap_failed_reqs", "counter", _SCHEDULER, "KV transfers that could not begin", "one fails"),
    _sglang("lora_pool_slots_total", "gauge", _SCHEDULER, "Adapter slots, the base model's included"),
)
PROMETHEUS = (MetricInfo("up", "gauge", ("job", "instance"), "1 while a target answers Prometheus", "prometheus"),)

# Of Prelude's own, those that begin with an event that a healthy cluster may not see.
_QUOTAS = "a tenant with a quota asks"
_ABSENT_UNTIL = {
    "prelude_router_stream_errors": "a stream ends with an error",
    "prelude_router_denials": "a caller is refused",
    "prelude_router_quota_used_ratio": _QUOTAS,
    "prelude_router_quota_refusals": "a quota is reached",
    "prelude_router_queue_seconds": "a request waits for its tenant's turn",
    "prelude_router_retries": "an attempt fails",
    **dict.fromkeys(
        (
            "prelude_router_split_requests",
            "prelude_router_split_time_to_first_token_seconds",
            "prelude_router_split_time_per_output_token_seconds",
        ),
        "an alias is split",
    ),
    "prelude_router_role_changes": "the load wants a change",
    "prelude_router_workers_wanted": "role_changes is auto or dry-run",
    "prelude_router_aborts": "an engine call is aborted",
    "prelude_router_connections_refused": "a connection is refused",
    "prelude_router_exhausted": "the router lacks descriptors or connections",
    "prelude_router_adapter_changes": "an adapter is changed over HTTP",
    "prelude_worker_adapter_evictions": "an adapter is evicted",
    "prelude_worker_adapter_disk_cache_failures": "a write to the disk cache fails",
    "prelude_trainer_commands": "a command has an outcome",
    "prelude_trainer_command_seconds": "a command is computed",
    "prelude_trainer_push_seconds": "weights are pushed",
    METRIC: "TLS is configured",
    START_METRIC: "TLS is configured",
}


@cache
def metrics() -> dict[str, MetricInfo]:
    """All metrics by name."""
    found = [*_declared(Metrics().registry, "router"), *_declared(_agent_registry(), "agent"), _engine_steps()]
    trainer = _declared(TrainerMetrics().registry, "trainer")
    return {each.name: each for each in (*found, *trainer, *SGLANG, *PROMETHEUS)}


@cache
def series() -> dict[str, MetricInfo]:
    """The metric by the name of each of its series."""
    return {sample: metric for metric in metrics().values() for sample in metric.samples}


def _agent_registry() -> CollectorRegistry:
    agent = WorkerMetrics("", "prefill")
    ResidencyMetrics(agent.registry, "", "prefill")
    export_expiry(agent.registry, lambda: {"cluster": Validity(0.0, 0.0)})
    return agent.registry


def _engine_steps() -> MetricInfo:
    return MetricInfo(step_times.METRIC, "histogram", step_times.LABELS, step_times.TEXT, "engine")


def _declared(registry: CollectorRegistry, source: str) -> Iterator[MetricInfo]:
    """What a registry exports. prometheus_client tells the labels of a metric without samples in private only."""
    for collector in tuple(registry._collector_to_names):
        for family in _families(collector):
            own = getattr(collector, "_labelnames", None)
            labels = tuple(own or getattr(family, "_labelnames", None) or ())
            until = _ABSENT_UNTIL.get(family.name, "")
            yield MetricInfo(family.name, family.type, labels, family.documentation, source, until)


def _families(collector: Collector) -> Iterable:
    return collector.describe() if hasattr(collector, "describe") else collector.collect()
