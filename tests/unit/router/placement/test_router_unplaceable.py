"""Why no placement can take a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import FleetState, WorkerResidency, WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.placement.request import PlacementRequest
from router.placement.unplaceable import is_gone, lacks_unified_worker

UP = {"is_connected": True, "is_engine_up": True, "is_ready": True}
P0 = WorkerView("p0", "prefill", **UP)
D0 = WorkerView("d0", "decode", **UP)
U0 = WorkerView("u0", "unified", **UP)
STORED = PlacementRequest("sha256:ab")
EVERYWHERE = PlacementRequest("sha256:cd", positions="all")
UNSTORED = PlacementRequest("sha256:ab", is_stored=False)
UNSTORED_EVERYWHERE = PlacementRequest("sha256:ab", positions="all", is_stored=False)


def fleet_of(*workers: WorkerView) -> FleetState:
    return FleetState({worker.name: worker for worker in workers}, WorkerLoads())


@pytest.mark.parametrize(
    ("workers", "lacks"),
    [((U0,), False), ((U0, P0, D0), False), ((P0, D0), True), ((replace(U0, is_ready=False), P0, D0), False)],
)
def test_lacks_unified_worker(workers: tuple, lacks: bool) -> None:
    assert lacks_unified_worker(EVERYWHERE, fleet_of(*workers)) is lacks
    assert not lacks_unified_worker(STORED, fleet_of(*workers))


@pytest.mark.parametrize(
    "change", [{"is_connected": False}, {"is_engine_up": False}, {"is_ready": False}, {"is_draining": True}]
)
def test_it_is_gone_only_when_all_say_so(change: dict[str, bool]) -> None:
    def gone(*workers: WorkerView, request: PlacementRequest = UNSTORED) -> bool:
        return is_gone(request, fleet_of(*workers))

    residency = WorkerResidency()
    residency.apply(control.ResidencyDelta(snapshot=True, in_memory_only=["sha256:ab"]))
    has_it = replace(P0, residency=residency)
    assert gone(P0, U0, D0)
    assert not gone(P0, U0, D0, request=STORED)
    assert not gone(has_it, U0, D0)
    assert not gone(replace(has_it, **change), U0, D0)
    assert gone(replace(P0, **change), U0, D0) is change.get("is_connected", True)  # it may have it
    assert gone(P0, U0, replace(D0, **change))  # which cannot
    assert gone(has_it, U0, request=UNSTORED_EVERYWHERE)
    assert gone(replace(P0, **change), U0, request=UNSTORED_EVERYWHERE)
