"""Alerts on what workers and routers depend on: adapters, KV transfer, the catalog, certificates, the audit log."""

from __future__ import annotations

from observability.alerts.alert import Alert

_LOADS, _HITS = "prelude_worker_adapter_loads_total", "prelude_worker_adapter_lease_hits_total"
_COLD_LOADS = f'{_LOADS}{{source=~"store|disk"}}'
_FAILED_LOADS = f'{_LOADS}{{result!="ok"}}'
_EVICTIONS = 'prelude_worker_adapter_evictions_total{tier="host"}'
_FAILED = "sglang:num_transfer_failed_reqs_total", "sglang:num_bootstrap_failed_reqs_total"
_ENDS, _BEGINS = (f"prelude_certificate_{what}_timestamp_seconds" for what in ("expiry", "start"))
_CERTIFICATE = "namespace, release, job, certificate"
_ENGINE = "namespace, release, job, instance"  # an agent and its engine have one address


def _rate(name: str, window: str, by: str = "namespace, release") -> str:
    return f"sum by ({by}) (rate({name}[{window}]))"


def _new_failures(name: str) -> str:
    """Failures in ten minutes, or since the first sample. SGLang's counter begins at its first failure.

    `increase` would not see that one. An engine that answered ten minutes ago without the counter had no failures; of
    one that was not seen then, the counter's least value says what is old.
    """
    now, before, least = (
        f"sum by ({_ENGINE}) ({series})" for series in (name, f"{name} offset 10m", f"min_over_time({name}[10m])")
    )
    had_none = f"({now} * 0 and on ({_ENGINE}) (max by ({_ENGINE}) (up offset 10m) == 1))"
    return f"({now} - ({before} or {had_none} or {least}))"


def _expires(within: str, left: float) -> str:
    """Within some time, and with no more left of its own than a share: cert-manager renews when a third is left."""
    return (
        f"(min by ({_CERTIFICATE}) ({_ENDS}) - time() < {within}) unless on ({_CERTIFICATE})"
        f" (min by ({_CERTIFICATE}) (({_ENDS} - time()) / ({_ENDS} - {_BEGINS})) > {left:g})"
    )


_EITHER_FAILS = f"({_new_failures(_FAILED[0])} >= 3) or ({_new_failures(_FAILED[1])} >= 3)"
_PER_WORKER = "namespace, release, worker"

ALERTS = (
    Alert(
        "PreludeColdLoadStorm",
        "warning",
        f"({_rate(_COLD_LOADS, '5m')} / ({_rate(_LOADS, '5m')} + {_rate(_HITS, '5m')}) > 0.3)"
        " and on (namespace, release) (sum by (namespace, release) (prelude_worker_adapter_load_waiters) >= 8)",
        "3m",
        "adapters-load-too-often",
        "Many requests wait for cold adapters",
        "{{ $value | humanizePercentage }} of the requests for adapters of {{ $labels.namespace }} need a load from "
        "disk or the store.",
    ),
    Alert(
        "PreludeAdapterLoadsFail",
        "warning",
        f"({_rate(_FAILED_LOADS, '10m')} / {_rate(_LOADS, '10m')} > 0.1)"
        f" and on (namespace, release) ({_rate(_FAILED_LOADS, '10m')} * 600 > 5)",
        "5m",
        "adapters-load-too-often",
        "Adapters cannot be loaded",
        "{{ $value | humanizePercentage }} of the loads of {{ $labels.namespace }} fail.",
    ),
    Alert(
        "PreludeResidencyThrash",
        "warning",
        f"{_rate(_EVICTIONS, '15m', _PER_WORKER)}"
        f" / ({_rate(_LOADS, '15m', _PER_WORKER)} + {_rate(_HITS, '15m', _PER_WORKER)}) > 0.3"
        f" and {_rate(_EVICTIONS, '15m', _PER_WORKER)} * 900 > 50",
        "10m",
        "residency-thrashes",
        "Host memory is too small for the adapters in use",
        "{{ $labels.worker }} evicts an adapter for {{ $value | humanizePercentage }} of its requests for adapters.",
    ),
    Alert(
        "PreludeSlotThrash",
        "warning",
        "sum by (namespace, release, instance) (rate(prelude_engine_adapter_step_seconds_sum[10m])) > 0.1",
        "10m",
        "residency-thrashes",
        "An engine spends its time on swapping adapters",
        "{{ $value | humanizePercentage }} of the time of {{ $labels.instance }} goes to loads and fills of slots.",
    ),
    Alert(
        "PreludeKvTransfersFail",
        "critical",
        _EITHER_FAILS,
        "0m",
        "kv-transfers-fail",
        "KV cache does not arrive",
        "{{ $value }} KV transfers of {{ $labels.instance }} have failed within ten minutes.",
    ),
    Alert(
        "PreludeCatalogLags",
        "warning",
        "max by (namespace, release) (prelude_router_catalog_staleness_seconds) > 30",
        "2m",
        "catalog-lags",
        "Routers serve old names",
        "A router of {{ $labels.namespace }} has not read the catalog for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "PreludeCertificateExpires",
        "warning",
        _expires("14 * 86400", 0.25),
        "1h",
        "certificates-expire",
        "A certificate expires within two weeks",
        "The certificate `{{ $labels.certificate }}` of {{ $labels.job }} expires in {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "PreludeCertificateExpiresSoon",
        "critical",
        _expires("2 * 86400", 0.1),
        "5m",
        "certificates-expire",
        "A certificate expires within two days",
        "The certificate `{{ $labels.certificate }}` of {{ $labels.job }} expires in {{ $value | humanizeDuration }}. "
        "Then connections are refused.",
    ),
    Alert(
        "PreludeAuditEventsLost",
        "warning",
        "sum by (namespace, release) (increase(prelude_router_audit_events_lost_total[15m])) > 0",
        "0m",
        "audit-events-are-lost",
        "The audit log has a hole",
        'About {{ $value | printf "%.0f" }} audit events of {{ $labels.namespace }} could not be written.',
    ),
)
