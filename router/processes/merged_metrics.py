"""Sums the metrics of several processes.

prometheus_client's own multi-process mode, with memory-mapped files, cannot read gauges at the time of the scrape and
needs a folder that is empty at each start. Merging text pages avoids both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from process.certificates.expiry import METRIC, START_METRIC

_LARGEST = {  # of the processes; everything else is a sum
    "prelude_router_catalog_staleness_seconds",
    "prelude_router_quota_routers",
    "prelude_router_quota_used_ratio",
    "prelude_router_workers",
    "prelude_router_workers_placeable",
    "prelude_router_worker_kv_used_ratio",
    "prelude_router_decode_kv_used_ratio",
    "prelude_router_decode_load_ratio",
    "prelude_router_decode_queue_requests",
}
_EARLIEST = {METRIC, START_METRIC}  # of the processes: of the one that has the oldest certificate
_FIRST = "_created"  # such a sample is the time at which its counter began


class _Page:
    """Stands in for a registry in `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_metrics(pages: Sequence[bytes]) -> bytes:
    """The pages of several processes as one, in Prometheus' text format."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                found[key] = _merge(sample.name)(found[key], sample.value) if key in found else sample.value
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return generate_latest(_Page(families.values()))  # type: ignore[arg-type]


def _merge(name: str) -> Callable[[float, float], float]:
    if name in _LARGEST:
        return max
    return min if name in _EARLIEST or name.endswith(_FIRST) else float.__add__
