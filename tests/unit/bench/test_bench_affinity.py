"""The load of the affinity benchmark, and the policies that it compares."""

from __future__ import annotations

from collections import Counter

from bench.affinity import _LOADED, POLICIES, QUICK, Options, adapters_of
from router.metrics import Metrics
from router.placement.policy import Policy


def test_every_policy_gets_the_same_load_by_a_zipf_law() -> None:
    adapters = adapters_of(Options(num_requests=20_000))
    assert adapters == adapters_of(Options(num_requests=20_000))
    assert adapters[:40] == adapters_of(Options(num_requests=40))
    counts = Counter(adapters)
    assert 1.7 < counts[0] / counts[1] < 2.3
    assert 190 <= len(counts) <= 200
    assert max(adapters_of(QUICK)) < QUICK.num_adapters


def test_cold_loads_are_read_from_the_router_s_metrics() -> None:
    metrics = Metrics()
    metrics.ensured_adapters.labels("resident").inc(7)
    metrics.ensured_adapters.labels("loaded").inc(3)
    found = _LOADED.search(metrics.page().decode())
    assert found is not None
    assert float(found[1]) == 3


def test_the_other_policy_is_fewest_in_flight() -> None:
    (weighted,) = Policy.of(POLICIES["fewest_in_flight"]).scorers
    assert weighted[1].name == "in_flight"
    assert "in_flight" not in [scorer.name for _, scorer in Policy.of(POLICIES["affinity"]).scorers]
