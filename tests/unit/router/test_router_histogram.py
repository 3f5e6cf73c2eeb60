"""The event loop's histogram shows what prometheus_client's own would."""

from __future__ import annotations

from random import Random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.collectors import LoopHistogram

BUCKETS = (0.005, 0.01, 0.5, 1, 300)


def page(kind: type[Histogram], values: list[float]) -> bytes:
    registry = CollectorRegistry()
    labelled = kind("took_seconds", "Time.", ("phase",), buckets=BUCKETS, registry=registry).labels("waiting")
    alone = kind("waited_seconds", "Time.", buckets=BUCKETS, registry=registry)
    for value in values:
        labelled.observe(value)
        alone.observe(value)
    lines = generate_latest(registry).splitlines()
    return b"\n".join(line for line in lines if b"_created" not in line)


def test_the_page_is_that_of_prometheus_client() -> None:
    seed = 5
    random = Random(seed)
    values = [random.choice((*BUCKETS, random.uniform(0, 2), random.uniform(0, 1000), 0.0)) for _ in range(500)]
    assert page(LoopHistogram, values) == page(Histogram, values), f"seed {seed}"
