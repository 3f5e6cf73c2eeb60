"""When a process's certificates expire, as metrics."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

METRIC = "prelude_certificate_expiry_timestamp_seconds"
START_METRIC = "prelude_certificate_start_timestamp_seconds"


class Validity(NamedTuple):
    """In seconds since the epoch, as time.time()."""

    begins: float
    ends: float


class _Expiry(Collector):
    def __init__(self, read: Callable[[], Mapping[str, Validity]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        found = self._read()
        if found:
            text = "When the certificate in use expires: of the cluster, of its authority (ca), for clients."
            ends = GaugeMetricFamily(METRIC, text, labels=("certificate",))
            text = "When the certificate in use became valid, from which its age follows."
            begins = GaugeMetricFamily(START_METRIC, text, labels=("certificate",))
            for name, validity in sorted(found.items()):
                ends.add_metric((name,), validity.ends)
                begins.add_metric((name,), validity.begins)
            yield from (ends, begins)


def export_expiry(registry: CollectorRegistry, read: Callable[[], Mapping[str, Validity]]) -> None:
    """Export what `read` returns at each scrape, by certificate. Nothing if that is empty."""
    registry.register(_Expiry(read))
