"""Placement: which pairs may take a request, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.fleet_state import FleetState, WorkerView
from router.in_flight import InFlightState
from router.placement import PlacementRequest, rank_pairs

REQUEST = PlacementRequest("sha256:ab")
UP = {"is_connected": True, "is_engine_up": True, "is_ready": True}
D0 = WorkerView("d0", "decode", incarnation="d0-1", **UP)
D1 = WorkerView("d1", "decode", incarnation="d1-1", **UP)
WARM = frozenset({("d0", "d0-1"), ("d1", "d1-1")})
P0 = WorkerView("p0", "prefill", incarnation="p0-1", warm_pairs=WARM, **UP)
P1 = WorkerView("p1", "prefill", incarnation="p1-1", warm_pairs=WARM, **UP)


def ranked(*workers: WorkerView, **in_flight: int) -> list[str]:
    return [str(pair) for pair in rank_pairs(REQUEST, FleetState({w.name: w for w in workers}, in_flight))]


def test_ties_go_by_name_whatever_the_order() -> None:
    expected = ["p0>d0", "p0>d1", "p1>d0", "p1>d1"]
    assert ranked(P0, P1, D0, D1) == expected
    assert ranked(D1, P1, D0, P0) == expected


def test_fewest_in_flight_first() -> None:
    assert ranked(P0, P1, D0, D1, p0=1) == ["p1>d0", "p1>d1", "p0>d0", "p0>d1"]
    assert ranked(P0, P1, D0, D1, p0=1, d0=2) == ["p1>d1", "p0>d1", "p1>d0", "p0>d0"]


@pytest.mark.parametrize(
    "change",
    [{"is_connected": False}, {"is_engine_up": False}, {"is_ready": False}, {"is_draining": True}],
)
def test_not_placeable(change: dict[str, bool]) -> None:
    assert ranked(replace(P0, **change), P1, D0) == ["p1>d0"]
    assert ranked(P0, replace(D0, **change), D1) == ["p0>d1"]
    assert ranked(P0, replace(D0, **change)) == []


def test_pairs_must_be_warm_as_they_run_now() -> None:
    assert ranked(P0, replace(D0, incarnation="d0-2"), D1) == ["p0>d1"]
    assert ranked(replace(P0, warm_pairs=frozenset()), P1, D0) == ["p1>d0"]


def test_decode_workers_are_not_prefill_workers() -> None:
    assert ranked(D0, D1) == ranked(P0, P1) == ranked() == []


def test_holds_are_released_once() -> None:
    state = InFlightState()
    holds = [state.hold("p0"), state.hold("p0")]
    assert state.counts == {"p0": 2}
    holds[0].release()
    holds[0].release()
    assert state.counts == {"p0": 1}
