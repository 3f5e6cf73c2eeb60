"""How busy the fleet is, as metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fleets import DECODES, MAX_KV_TOKENS, PREFILLS, UNIFIED, fleet_of

from router.fleet.saturation import Saturation
from router.metrics import Metrics

P0, P1 = PREFILLS
D0, D1 = DECODES
U0, _ = UNIFIED


def page_of(saturation: Saturation, metrics: Metrics | None = None) -> dict[str, float]:
    """The samples of the metrics page that are about the fleet."""
    metrics = metrics or Metrics()
    metrics.set_saturation(saturation.num_placeable, saturation.queue_s, saturation.kv_used)
    lines = (line.rsplit(" ", 1) for line in metrics.page().decode().splitlines() if not line.startswith("#"))
    prefixes = ("workers_placeable", "worker_queue", "worker_kv", "prefill_queue", "decode_kv")
    names = tuple(f"prelude_router_{prefix}" for prefix in prefixes)
    return {name.removeprefix("prelude_router_"): float(value) for name, value in lines if name.startswith(names)}


def test_queues_and_kv_memory_by_worker_and_in_the_mean() -> None:
    found = page_of(Saturation.of(fleet_of(P0, replace(P1, is_draining=True), D0, D1, U0, p0=10, d0=50, u0=20)))
    assert found == {
        'workers_placeable{role="prefill"}': 1,
        'workers_placeable{role="decode"}': 2,
        'workers_placeable{role="unified"}': 1,
        'worker_queue_seconds{worker="p0"}': pytest.approx(2.0),
        'worker_queue_seconds{worker="u0"}': pytest.approx(4.0),
        'worker_kv_used_ratio{worker="d0"}': 0.5,
        'worker_kv_used_ratio{worker="d1"}': 0.0,
        'worker_kv_used_ratio{worker="u0"}': 0.2,
        "prefill_queue_seconds": pytest.approx(3.0),
        "decode_kv_used_ratio": pytest.approx(0.7 / 3),
    }


def test_workers_that_left_have_no_value() -> None:
    metrics = Metrics()
    page_of(Saturation.of(fleet_of(P0, D0, p0=1)), metrics)
    left = page_of(Saturation.of(fleet_of(replace(P0, is_connected=False))), metrics)
    assert not [name for name in left if "worker=" in name]
    assert left["prefill_queue_seconds"] == left["decode_kv_used_ratio"] == 0
    assert left['workers_placeable{role="prefill"}'] == 0


def test_what_an_engine_reports_counts_if_it_is_more_than_what_was_placed() -> None:
    fleet = fleet_of(D0, d0=10)
    fleet.loads["d0"].reported_kv_tokens = MAX_KV_TOKENS // 2
    assert Saturation.of(fleet).kv_used == {"d0": 0.5}
