"""What a router makes of the other routers of its workers: their number, and the prompts that it has not sent."""

from typing import Any

import pytest
from support.routers.fleets import PREFILLS

from cluster.control import control_pb2 as pb
from cluster.control.worker_state import WorkerStateHub
from router.fleet.fleet_state import FleetState, Holders
from router.fleet.queues import Queues
from router.fleet.worker_loads import WorkerLoads
from router.placement.placement import PrefillCandidates
from router.placement.placer import Placer
from router.placement.request import Placement, PlacementRequest, PromptSize

SIZE = PromptSize(1000, 1100)


def loads_with(num_own: int = 1, *, were_read: bool = False, **told: Any) -> WorkerLoads:
    """Loads of a router that has sent prompts of 1000 tokens to p0, which tells the rest."""
    loads = WorkerLoads(lambda: 0.0)
    for _ in range(num_own):
        in_flight = loads.add("p0", prompt_tokens=1000)
        in_flight.read_begins()
        if were_read:
            in_flight.read_ended()
    loads["p0"].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=0, **told)
    return loads


@pytest.mark.parametrize(
    ("role", "load", "num_own", "were_read", "num_others"),
    [
        # Half of what the engine has is this router's: of the one it reads those that run, of the other it sends KV.
        ("unified", pb.Load(running_requests=8, queued_requests=8), 8, False, 4),
        ("prefill", pb.Load(running_requests=0, queued_requests=16, awaiting_kv_requests=8), 8, False, 4),
        ("unified", pb.Load(running_requests=30, queued_requests=10), 30, True, 10),  # its own answers run
    ],
)
def test_own_prompts_hide_no_other_router_s(
    role: str, load: pb.Load, num_own: int, were_read: bool, num_others: int
) -> None:
    queues = Queues.of(load)
    told = {"queues": queues, "num_routers": 2, "num_unread": queues.num_unread(role)}
    found = loads_with(num_own, were_read=were_read, **told)["p0"]
    assert found.others_tokens == 0.5 * num_others * 1000


async def test_an_agent_says_how_many_routers_follow_it() -> None:
    hub = WorkerStateHub()
    watching = [hub.watch(5.0, by_router=by_router) for by_router in (False, True, True)]  # the first is an operator
    assert [(await anext(states)).routers for states in watching] == [0, 1, 2]
    for number, states in zip((2, 1, 0), watching, strict=True):
        await states.aclose()
        assert hub.state.routers == number


def test_other_routers_prompts_are_half_counted_as_long_as_this_one_s() -> None:
    load = loads_with(num_routers=2, num_unread=5)["p0"]
    assert (load.prompt_tokens, load.others_tokens, load.unread_tokens) == (1000, 2000, 3000)
    assert load.wait_s == pytest.approx(3 * load.queue_s)


@pytest.mark.parametrize("num_routers", [0, 1])  # 0: an agent of an earlier release
def test_a_router_alone_goes_by_its_own_count(num_routers: int) -> None:
    load = loads_with(num_routers=num_routers, num_unread=5)["p0"]
    assert load.unread_tokens == load.prompt_tokens == 1000
    assert load.wait_s == load.queue_s


def test_a_worker_that_others_keep_busy_costs_more() -> None:
    def best(num_routers: int) -> str:
        loads = WorkerLoads(lambda: 0.0)
        loads.add("p0", prompt_tokens=1000).release()  # says how long prompts are
        loads["p0"].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=0, num_routers=num_routers, num_unread=9)
        fleet = FleetState({worker.name: worker for worker in PREFILLS}, loads, Holders())
        readers = PrefillCandidates(PlacementRequest(None, size=SIZE), fleet, Placer(loads).policy)
        return readers.workers[next(readers.best_first())].name

    assert (best(1), best(4)) == ("p0", "p1")


@pytest.mark.parametrize("num_routers", [1, 4])
def test_each_router_wants_as_many_homes_as_all_requests_need(num_routers: int) -> None:
    """Four routers with a quarter of the demand each want what one with all of it wants."""
    loads = WorkerLoads(lambda: 0.0)
    placer = Placer(loads, clock=lambda: 0.0)
    loads["p0"].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=0, num_routers=num_routers)
    request = PlacementRequest("sha256:a", size=SIZE)
    for _ in range(10):  # 0.2 s each, within ten seconds: 0.2 of a worker's time
        placer.take(request, Placement(PREFILLS[0], PREFILLS[0])).release()
    assert placer.policy.num_homes(placer.observe(request)) == num_routers
