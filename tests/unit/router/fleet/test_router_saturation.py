"""How busy the fleet is, as metrics."""

from dataclasses import replace

import pytest
from support.routers.fleets import DECODES, MAX_KV_TOKENS, PREFILLS, UNIFIED, fleet_of

from router.fleet.fleet_state import FleetState
from router.fleet.queues import Queues
from router.fleet.saturation import NONE_WAITS, Waiting, show_saturation
from router.fleet.worker_loads import WorkerLoads
from router.metrics import Metrics
from router.placement.placer import Placer
from router.placement.request import Placement, PlacementRequest, PromptSize

P0, P1 = PREFILLS
D0, D1 = DECODES
U0, _ = UNIFIED


def page_of(
    fleet: FleetState, metrics: Metrics | None = None, prefill_demand: float = 0.0, waiting: Waiting = NONE_WAITS
) -> dict[str, float]:
    """The samples of the metrics page that are about the fleet."""
    metrics = metrics or Metrics()
    show_saturation(fleet, metrics, prefill_demand, waiting)
    lines = (line.rsplit(" ", 1) for line in metrics.page().decode().splitlines() if not line.startswith("#"))
    prefixes = ("workers_placeable", "worker_queue", "worker_kv", "prefill_", "decode_")
    names = tuple(f"prelude_router_{prefix}" for prefix in prefixes)
    return {name.removeprefix("prelude_router_"): float(value) for name, value in lines if name.startswith(names)}


def test_queues_and_kv_memory_by_worker_and_in_the_mean() -> None:
    found = page_of(fleet_of(P0, replace(P1, is_draining=True), D0, D1, U0, p0=10, d0=50, u0=20))
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
        "decode_queue_requests": 0,
        "decode_load_ratio": 0,  # no queues are reported
        "prefill_decode_ratio": 0,
    }


def test_workers_that_left_have_no_value() -> None:
    metrics = Metrics()
    page_of(fleet_of(P0, D0, p0=1), metrics)
    left = page_of(fleet_of(replace(P0, is_connected=False)), metrics)
    assert not [name for name in left if "worker=" in name]
    assert left["prefill_queue_seconds"] == left["decode_kv_used_ratio"] == 0
    assert left['workers_placeable{role="prefill"}'] == 0


HALF = MAX_KV_TOKENS // 2
WAITS = Queues(requests=100, awaiting_memory=100)


@pytest.mark.parametrize(
    ("prefill", "decode", "prefill_queue_s", "decode_queue", "decode_load"),
    [
        # Prompts that wait for generating sequences count for decode.
        (WAITS, Queues(164, awaiting_memory=100, max_running=64, active_kv_tokens=HALF), 0, 100, 1 + 100 / 64),
        # They wait at prefill workers until decode's memory, which is kept for them, is taken: prefill is short.
        (WAITS, Queues(164, awaiting_memory=100, awaiting_kv=64, max_running=64), 2.0, 0, 0),
        # Two of a real engine's sequences, which may become long, beside ten that wait: reserved memory is taken.
        (Queues(), Queues(12, awaiting_memory=10, max_running=32, active_kv_tokens=HALF // 10), 2.0, 10, 1 + 10 / 2),
        # A queue for memory is shared as the memory is.
        (
            Queues(80, awaiting_memory=40),
            Queues(100, awaiting_memory=40, awaiting_kv=30, max_running=60),
            2.0 * (1 - 0.5 * 0.5),
            20,
            0.5 * (1 + 40 / 60),
        ),
        # KV on its way is no unread prompt.
        (Queues(30, awaiting_memory=10, awaiting_kv=20), Queues(20, awaiting_memory=10, max_running=10), 0, 10, 2),
    ],
)
def test_which_pool_a_queue_waits_for(
    prefill: Queues, decode: Queues, prefill_queue_s: float, decode_queue: float, decode_load: float
) -> None:
    found = page_of(reporting(fleet_of(P0, D0, p0=10), p0=prefill, d0=decode))
    assert found['worker_queue_seconds{worker="p0"}'] == pytest.approx(2.0)  # what placement goes by
    assert found["prefill_queue_seconds"] == pytest.approx(prefill_queue_s)
    assert found["decode_queue_requests"] == pytest.approx(decode_queue)
    assert found["decode_load_ratio"] == pytest.approx(decode_load)


@pytest.mark.parametrize(
    ("decode", "prefill_queue_s", "decode_queue", "decode_load"),
    [
        (Queues(63, max_running=64), 2.0 + 3.0, 0, 63 / 64),
        (Queues(64, max_running=64), 2.0, 16, 1 + 16 / 64),
        (Queues(64, awaiting_kv=64, max_running=64), 2.0, 16, 16 / 64),
        (Queues(), 2.0 + 3.0, 0, 0),  # nothing is reported
    ],
)
def test_requests_in_the_router_wait_for_the_pool_that_takes_no_more(
    decode: Queues, prefill_queue_s: float, decode_queue: float, decode_load: float
) -> None:
    found = page_of(reporting(fleet_of(P0, D0, p0=10), d0=decode), waiting=(16, 15_000))
    assert found["prefill_queue_seconds"] == pytest.approx(prefill_queue_s)
    assert found["decode_queue_requests"] == decode_queue
    assert found["decode_load_ratio"] == pytest.approx(decode_load)


def reporting(fleet: FleetState, **queues: Queues) -> FleetState:
    """The fleet once engines have reported."""
    for name, reported in queues.items():
        fleet.loads[name].report(fleet.loads.clock(), used_kv_tokens=0, max_kv_tokens=MAX_KV_TOKENS, queues=reported)
    return fleet


@pytest.mark.parametrize("queues", [Queues(), Queues(requests=1, awaiting_memory=9, awaiting_kv=9, max_running=1)])
def test_reports_that_contradict_themselves_give_numbers_in_range(queues: Queues) -> None:
    """An engine publishes between batches; its parts need not be of one moment."""
    found = page_of(reporting(fleet_of(P0, D0, p0=10), p0=queues, d0=queues))
    assert 0 <= found["prefill_queue_seconds"] <= 2.001
    assert 0 <= found["decode_queue_requests"] <= 9
    assert found["decode_load_ratio"] >= 0


@pytest.mark.parametrize(
    ("prefill_demand", "generating", "expected"),
    [(1.5, 32, 1.5 / 0.5), (0.0, 32, 0.0), (1.5, 64, 1.5 / 1.0), (1.5, 0, 0.0)],  # one of two decode workers generates
)
def test_the_ratio_of_demand_for_prefill_to_demand_for_decode(
    prefill_demand: float, generating: int, expected: float
) -> None:
    fleet = reporting(fleet_of(P0, D0, D1), d0=Queues(requests=generating, max_running=64), d1=Queues(max_running=64))
    assert page_of(fleet, prefill_demand=prefill_demand)["prefill_decode_ratio"] == expected


def test_demand_for_prefill_is_that_of_prompts_at_prefill_workers() -> None:
    now = 0.0
    loads = WorkerLoads(lambda: now)
    placer = Placer(loads, clock=lambda: now)
    for i in range(600):  # each second a prompt of 0.5 s at 5,000 tokens/s, under an adapter or not
        now = float(i)
        request = PlacementRequest(None if i % 2 else "sha256:a", size=PromptSize(2500, 2600))
        placer.take(request, Placement(P0, D0)).release()
        placer.take(request, Placement(U0, U0)).release()
    assert placer.prefill_demand == pytest.approx(0.5, rel=0.02)
    now += 600
    assert placer.prefill_demand < 0.001
