"""The metrics page of several processes."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from router.metrics import Metrics
from router.processes.merged_metrics import merged_metrics


def page_of(num_requests: int, first_byte_s: float, staleness_s: float) -> bytes:
    metrics = Metrics()
    metrics.requests.labels("chat", "200").inc(num_requests)
    metrics.first_byte.labels("chat").observe(first_byte_s)
    metrics.in_flight.set_function(lambda: num_requests)
    metrics.catalog_staleness.set_function(lambda: staleness_s)
    return metrics.page()


def values(page: bytes) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_one_page_stays_as_it_is() -> None:
    page = page_of(2, 0.2, 0.1)
    assert sorted(merged_metrics([page]).splitlines()) == sorted(page.splitlines())


def test_counts_are_added_up_and_ages_are_not() -> None:
    found = values(merged_metrics([page_of(2, 0.2, 0.1), page_of(3, 0.003, math.inf)]))
    assert found["prelude_router_requests_total", ""] == 5
    assert found["prelude_router_requests_in_flight", ""] == 5
    assert found["prelude_router_processes", ""] == 2
    assert found["prelude_router_time_to_first_token_seconds_bucket", "0.005"] == 1
    assert found["prelude_router_time_to_first_token_seconds_bucket", "+Inf"] == 2
    assert found["prelude_router_time_to_first_token_seconds_sum", ""] == 0.203
    assert found["prelude_router_catalog_staleness_seconds", ""] == math.inf


def test_a_series_that_only_one_process_has_is_kept() -> None:
    one, other = Metrics(), Metrics()
    one.aborts.labels("prefill").inc()
    other.aborts.labels("decode").inc(4)
    lines = merged_metrics([one.page(), other.page()]).decode().splitlines()
    assert 'prelude_router_aborts_total{role="prefill"} 1.0' in lines
    assert 'prelude_router_aborts_total{role="decode"} 4.0' in lines
    assert lines.count("# TYPE prelude_router_aborts_total counter") == 1
