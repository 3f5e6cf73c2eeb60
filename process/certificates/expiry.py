"""When a process's certificates expire, as a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

METRIC = "prelude_certificate_expiry_timestamp_seconds"


class _Expiry(Collector):
    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        found = self._read()
        if found:
            text = "When the certificate in use expires: of the cluster, of its authority (ca), for clients."
            family = GaugeMetricFamily(METRIC, text, labels=("certificate",))
            for name, expiry in sorted(found.items()):
                family.add_metric((name,), expiry)
            yield family


def export_expiry(registry: CollectorRegistry, read: Callable[[], Mapping[str, float]]) -> None:
    """Export what `read` returns at each scrape: seconds since the epoch by certificate. Nothing if that is empty."""
    registry.register(_Expiry(read))
