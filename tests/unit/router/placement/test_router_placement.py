"""Placement: which workers may take a request, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.in_flight import InFlightState
from router.fleet.worker_residency import WorkerResidency
from router.placement.placement import Placement, PlacementRequest, is_gone, lacks_unified_worker, rank_placements

REQUEST = PlacementRequest("sha256:ab")
EVERYWHERE = PlacementRequest("sha256:cd", positions="all")
UP = {"is_connected": True, "is_engine_up": True, "is_ready": True}
D0 = WorkerView("d0", "decode", incarnation="d0-1", **UP)
D1 = WorkerView("d1", "decode", incarnation="d1-1", **UP)
WARM = frozenset({("d0", "d0-1"), ("d1", "d1-1")})
P0 = WorkerView("p0", "prefill", incarnation="p0-1", warm_pairs=WARM, **UP)
P1 = WorkerView("p1", "prefill", incarnation="p1-1", warm_pairs=WARM, **UP)
U0 = WorkerView("u0", "unified", incarnation="u0-1", **UP)
U1 = WorkerView("u1", "unified", incarnation="u1-1", **UP)
UNREADY_CHANGES = [{"is_connected": False}, {"is_engine_up": False}, {"is_ready": False}, {"is_draining": True}]


def ranked(*workers: WorkerView, request: PlacementRequest = REQUEST, **in_flight: int) -> list[str]:
    return [str(each) for each in rank_placements(request, FleetState({w.name: w for w in workers}, in_flight))]


def test_ties_go_by_name_whatever_the_order() -> None:
    expected = ["p0>d0", "p0>d1", "p1>d0", "p1>d1"]
    assert ranked(P0, P1, D0, D1) == expected
    assert ranked(D1, P1, D0, P0) == expected


def test_fewest_in_flight_first() -> None:
    assert ranked(P0, P1, D0, D1, p0=1) == ["p1>d0", "p1>d1", "p0>d0", "p0>d1"]
    assert ranked(P0, P1, D0, D1, p0=1, d0=2) == ["p1>d1", "p0>d1", "p1>d0", "p0>d0"]


@pytest.mark.parametrize("change", UNREADY_CHANGES)
def test_not_placeable(change: dict[str, bool]) -> None:
    assert ranked(replace(P0, **change), P1, D0) == ["p1>d0"]
    assert ranked(P0, replace(D0, **change), D1) == ["p0>d1"]
    assert ranked(P0, replace(D0, **change)) == []
    assert ranked(replace(U0, **change), U1) == ["u1"]


def test_pairs_must_be_warm_as_they_run_now() -> None:
    assert ranked(P0, replace(D0, incarnation="d0-2"), D1) == ["p0>d1"]
    assert ranked(replace(P0, warm_pairs=frozenset()), P1, D0) == ["p1>d0"]


def test_decode_workers_are_not_prefill_workers() -> None:
    assert ranked(D0, D1) == ranked(P0, P1) == ranked() == []


@pytest.mark.parametrize(
    ("workers", "in_flight", "expected"),
    [
        ((U1, U0), {}, ["u0", "u1"]),
        ((U0, U1), {"u0": 1}, ["u1", "u0"]),
        ((U0, P0, D0), {}, ["p0>d0", "u0"]),
        ((U0, P0, D0), {"d0": 1}, ["u0", "p0>d0"]),
        ((U0, P0, D0, D1), {"p0": 1, "d0": 1, "u0": 1}, ["p0>d1", "u0", "p0>d0"]),
        ((U0, P0), {}, ["u0"]),
        ((U0, D0), {}, ["u0"]),
    ],
)
def test_unified_workers_and_pairs_are_one_list(workers: tuple, in_flight: dict[str, int], expected: list[str]) -> None:
    assert ranked(*workers, **in_flight) == expected
    assert ranked(*workers, request=PlacementRequest(None), **in_flight) == expected


@pytest.mark.parametrize(
    ("workers", "expected", "lacks"),
    [
        ((U0, U1), ["u0", "u1"], False),
        ((U0, P0, D0), ["u0"], False),
        ((P0, D0), [], True),
        ((replace(U0, is_ready=False), P0, D0), [], False),
    ],
)
def test_adapters_that_act_everywhere_need_a_unified_worker(workers: tuple, expected: list[str], lacks: bool) -> None:
    assert ranked(*workers, request=EVERYWHERE) == expected
    fleet = FleetState({worker.name: worker for worker in workers}, {})
    assert lacks_unified_worker(EVERYWHERE, fleet) is lacks
    assert not lacks_unified_worker(REQUEST, fleet)


UNSTORED = PlacementRequest("sha256:ab", is_stored=False)
UNSTORED_EVERYWHERE = PlacementRequest("sha256:ab", positions="all", is_stored=False)


def having(worker: WorkerView, **delta: list[str]) -> WorkerView:
    residency = WorkerResidency()
    residency.apply(control.ResidencyDelta(snapshot=True, **delta))
    return replace(worker, residency=residency)


def test_what_no_store_has_goes_to_who_has_it() -> None:
    in_memory = having(P1, in_memory_only=["sha256:ab"])  # the engine has not got it back yet
    in_engine = having(U0, in_memory_only=["sha256:ab"], resident=["sha256:ab"])
    on_disk, other = having(P0, on_disk=["sha256:ab"]), having(U1, in_memory_only=["sha256:cd"])
    workers = (on_disk, in_memory, in_engine, other, D0)
    assert ranked(*workers, request=UNSTORED) == ["p1>d0", "u0"]
    assert ranked(*workers, request=UNSTORED_EVERYWHERE) == ["u0"]
    assert ranked(*workers, request=REQUEST) == ["p0>d0", "p1>d0", "u0", "u1"]
    assert ranked(*workers, request=PlacementRequest(None, is_stored=False)) == ["p0>d0", "p1>d0", "u0", "u1"]
    assert ranked(on_disk, replace(in_memory, is_ready=False), D0, request=UNSTORED) == []


@pytest.mark.parametrize("change", UNREADY_CHANGES)
def test_it_is_gone_only_when_all_say_so(change: dict[str, bool]) -> None:
    def gone(*workers: WorkerView, request: PlacementRequest = UNSTORED) -> bool:
        return is_gone(request, FleetState({worker.name: worker for worker in workers}, {}))

    has_it = having(P0, in_memory_only=["sha256:ab"])
    assert gone(P0, U0, D0)
    assert not gone(P0, U0, D0, request=REQUEST)
    assert not gone(has_it, U0, D0)
    assert not gone(replace(has_it, **change), U0, D0)
    assert gone(replace(P0, **change), U0, D0) is change.get("is_connected", True)  # it may have it
    assert gone(P0, U0, replace(D0, **change))  # which cannot
    assert gone(has_it, U0, request=UNSTORED_EVERYWHERE)
    assert gone(replace(P0, **change), U0, request=UNSTORED_EVERYWHERE)


def test_a_unified_worker_is_one_worker() -> None:
    assert (Placement(U0, U0).workers, Placement(U0, U0).is_unified) == ((U0,), True)
    assert (Placement(P0, D0).workers, Placement(P0, D0).is_unified) == ((P0, D0), False)


def test_holds_are_released_once() -> None:
    state = InFlightState()
    holds = [state.hold("p0"), state.hold("p0")]
    assert state.counts == {"p0": 2}
    holds[0].release()
    holds[0].release()
    assert state.counts == {"p0": 1}
