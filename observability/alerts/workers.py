"""Alerts on workers and routers: none left, lost, hung, flapping, not ready, out of capacity."""

from __future__ import annotations

from observability.alerts.alert import Alert

_PLACEABLE = "prelude_router_workers_placeable"
_WORKER = "namespace, release, worker, role"
_NONE = 'max by (namespace, release) ({}{{role="{}"}}) == 0'

ALERTS = (
    Alert(  # all that routers export is gone then, and what other alerts look at with it
        "PreludeNoRouters",
        "critical",
        "count by (namespace, release) (prelude_worker_ready) unless on (namespace, release)"
        " count by (namespace, release) (prelude_router_processes)",
        "2m",
        "routers-are-missing",
        "No router answers",
        "{{ $labels.namespace }} has {{ $value }} worker(s), and no router answers Prometheus.",
    ),
    Alert(
        "PreludeNoWorkers",
        "critical",
        f"({_NONE.format(_PLACEABLE, 'unified')}) and on (namespace, release) "
        f"(({_NONE.format(_PLACEABLE, 'prefill')}) or ({_NONE.format(_PLACEABLE, 'decode')}))",
        "1m",
        "workers-are-missing",
        "No request can be served",
        "The routers of {{ $labels.namespace }} have no unified worker, and no pair of prefill and decode workers.",
    ),
    Alert(
        "PreludeWorkerLost",
        "warning",
        'max by (namespace, release, role) (prelude_router_workers{state="lost"}) > 0',
        "5m",
        "workers-are-missing",
        "A worker's agent does not answer",
        "{{ $value }} {{ $labels.role }} worker(s) of {{ $labels.namespace }} have been out of reach for five minutes.",
    ),
    Alert(  # not for an engine whose agent, at the same address, says that it is not ready: that has its own alert
        "PreludeTargetDown",
        "warning",
        '(up{job=~".*prelude.*"} == 0) unless on (namespace, release, instance) (prelude_worker_ready == 0)',
        "5m",
        "workers-are-missing",
        "A process does not answer Prometheus",
        "{{ $labels.instance }} of {{ $labels.job }} has not answered for five minutes: its alerts are blind.",
    ),
    Alert(
        "PreludeWorkerNotReady",
        "warning",
        f"max by ({_WORKER}) (prelude_worker_ready) == 0"
        f" unless on ({_WORKER}) (max by ({_WORKER}) (prelude_worker_draining) == 1)",
        "15m",
        "workers-are-missing",
        "A worker does not become ready",
        "{{ $labels.worker }} ({{ $labels.role }}) has not been ready for 15 minutes, and is not being drained.",
    ),
    Alert(
        "PreludeWorkerHung",
        "critical",
        f"max by ({_WORKER}) (prelude_worker_hung) == 1",
        "30s",
        "workers-hang-or-flap",
        "An engine shows no sign of life",
        "The engine of {{ $labels.worker }} ({{ $labels.role }}) hangs. Its agent starts it again if that goes on.",
    ),
    Alert(
        "PreludeWorkerFlaps",
        "warning",
        f"max by ({_WORKER}) (changes(prelude_worker_engine_restarts[30m])) >= 3"
        f" or max by ({_WORKER}) (changes(prelude_worker_ready[30m])) >= 6",
        "0m",
        "workers-hang-or-flap",
        "A worker comes and goes",
        "{{ $labels.worker }} ({{ $labels.role }}) has changed its state {{ $value }} times within 30 minutes.",
    ),
    Alert(
        "PreludePrefillQueueIsLong",
        "warning",
        "sum by (namespace, release) (prelude_router_prefill_queue_seconds) > 5",
        "10m",
        "capacity-is-short",
        "Prompts wait to be read",
        'A prompt of {{ $labels.namespace }} waits for {{ $value | printf "%.1f" }} s before it is read.',
    ),
    Alert(
        "PreludeDecodeIsShort",
        "warning",
        "max by (namespace, release) (prelude_router_decode_load_ratio) > 1.1",
        "10m",
        "capacity-is-short",
        "Sequences wait for decode workers",
        "What generates at the decode workers of {{ $labels.namespace }}, or waits to, needs {{ $value | "
        "humanizePercentage }} of their room.",
    ),
    Alert(
        "PreludeKvMemoryIsFull",
        "warning",
        "max by (namespace, release) (prelude_router_decode_kv_used_ratio) > 0.95",
        "10m",
        "capacity-is-short",
        "KV memory is nearly full",
        "{{ $value | humanizePercentage }} of the KV memory of {{ $labels.namespace }} is in use.",
    ),
)
