"""Metrics made at a scrape: rates of the busiest adapters, and histograms under OpenTelemetry's names."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import Histogram
from prometheus_client.core import Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

METRIC = "prelude_router_adapter_request_rate"
OTHER = "(other)"  # no adapter's name: those have no parentheses
# Of the endpoints, by their labels, in OpenTelemetry's GenAI conventions.
OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat", "embeddings": "embeddings"}
PROVIDER = "prelude"
_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_WINDOW_S = 60.0
_MAX_NAMES = 10_000  # that are counted by name in one window
_MAX_SHOWN = 20


class GenAiHistograms(Collector):
    """Histograms by endpoint, under the names that OpenTelemetry's GenAI conventions have for model servers.

    Written as Prometheus renders them. Endpoints of one operation are added up, at each scrape: requests pay nothing.
    """

    def __init__(self, histograms: Mapping[str, tuple[Histogram, str]]) -> None:
        """`histograms`, with their texts, by the conventions' name between `gen_ai.server.` and the unit."""
        self.model = ""
        self._histograms = histograms

    def collect(self) -> Iterable[HistogramMetricFamily]:
        for name, (histogram, text) in self._histograms.items():
            family = HistogramMetricFamily(f"gen_ai_server_{name}_seconds", text, labels=_GEN_AI_LABELS)
            for operation in dict.fromkeys(OPERATIONS.values()):
                buckets, total = _added_up(histogram, operation)
                if buckets:
                    family.add_metric((operation, PROVIDER, self.model), buckets, total)
            yield family


def _added_up(histogram: Histogram, operation: str) -> tuple[list[Any], float]:
    """The buckets and the sum of all endpoints of an operation."""
    buckets: dict[str, tuple[str, float, Exemplar | None]] = {}
    total = 0.0
    for sample in next(iter(histogram.collect())).samples:
        if OPERATIONS[sample.labels["endpoint"]] != operation:
            continue
        if sample.name.endswith("_sum"):
            total += sample.value
        elif sample.name.endswith("_bucket"):
            bound = sample.labels["le"]
            _, value, exemplar = buckets.get(bound, (bound, 0.0, None))
            buckets[bound] = bound, value + sample.value, sample.exemplar or exemplar
    return list(buckets.values()), total


class BusiestAdapters(Collector):
    """Requests per second over about the last minute, for the busiest adapters by name and for all others together.

    Memory is bounded by two windows: the current one, and the previous one, which counts in proportion to its overlap
    with the last minute. A counter per adapter would be simpler, but would have a label value for every adapter ever
    requested.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_at = now()
        self._filling: Counter[str] = Counter()
        self._full: Counter[str] = Counter()

    def count(self, adapter: str) -> None:
        """Count a request for an adapter, by its full name."""
        self._turn()
        is_known = adapter in self._filling or len(self._filling) < _MAX_NAMES
        self._filling[adapter if is_known else OTHER] += 1

    def rates(self) -> dict[str, float]:
        """Requests per second of at most twenty adapters, and of `OTHER` if there are more."""
        self._turn()
        share = 1 - (self._now() - self._began_at) / _WINDOW_S  # of the full window
        rates: dict[str, float] = {name: number / _WINDOW_S for name, number in self._filling.items()}
        for name, number in self._full.items():
            rates[name] = rates.get(name, 0.0) + share * number / _WINDOW_S
        others = rates.pop(OTHER, 0.0)
        ranked = sorted(rates.items(), key=lambda each: each[1], reverse=True)
        others += sum(rate for _, rate in ranked[_MAX_SHOWN:])
        return dict(ranked[:_MAX_SHOWN]) | ({OTHER: others} if others else {})

    def collect(self) -> Iterable[GaugeMetricFamily]:
        text = "Requests per second over the last minute: the twenty busiest adapters, and all others together."
        family = GaugeMetricFamily(METRIC, text, labels=("adapter",))
        for name, rate in self.rates().items():
            family.add_metric((name,), rate)
        yield family

    def _turn(self) -> None:
        age_s = self._now() - self._began_at
        if age_s < _WINDOW_S:
            return
        windows = int(age_s // _WINDOW_S)
        self._full = self._filling if windows == 1 else Counter()
        self._filling = Counter()
        self._began_at += windows * _WINDOW_S
