"""Placement: which workers take a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.in_flight import InFlightState
from router.fleet.worker_residency import WorkerResidency
from router.placement.placement import FailedAttempts, Placement, PlacementRequest, all_placements, place

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


def fleet_of(*workers: WorkerView, **in_flight: int) -> FleetState:
    return FleetState({worker.name: worker for worker in workers}, in_flight)


def placed(
    *workers: WorkerView,
    request: PlacementRequest = REQUEST,
    tried: tuple[Placement, ...] = (),
    failed: tuple[str, ...] = (),
    **in_flight: int,
) -> str | None:
    """The best placement by name. `tried` placements and `failed` workers are those of earlier attempts."""
    attempts = FailedAttempts()
    for placement in tried:
        attempts = attempts.with_placement(placement)
    for name in failed:
        attempts = attempts.with_worker(name)
    placement = place(request, fleet_of(*workers, **in_flight), attempts)
    return placement and str(placement)


def listed(*workers: WorkerView, request: PlacementRequest = REQUEST, **in_flight: int) -> list[str]:
    return [str(each) for each in all_placements(request, fleet_of(*workers, **in_flight))]


@pytest.mark.parametrize(
    ("workers", "in_flight", "expected"),
    [
        ((P0, P1, D0, D1), {}, "p0>d0"),
        ((D1, P1, D0, P0), {}, "p0>d0"),  # by name, whatever the order
        ((P0, P1, D0, D1), {"p0": 1}, "p1>d0"),
        ((P0, P1, D0, D1), {"d0": 1}, "p0>d1"),
        ((P0, P1, D0, D1), {"p0": 1, "d0": 2}, "p1>d1"),
        ((P0, P1, D0, D1), {"p0": 2, "p1": 1, "d0": 3, "d1": 3}, "p1>d0"),
        ((U1, U0), {}, "u0"),
        ((U0, U1), {"u0": 1}, "u1"),
        ((U0, P0, D0), {}, "p0>d0"),
        ((U0, P0, D0), {"d0": 1}, "u0"),
        ((U0, P0, D0, D1), {"p0": 1, "d0": 1, "u0": 1}, "p0>d1"),
        ((U0, P0, D0, D1), {"p0": 1, "d0": 1, "d1": 1, "u0": 1}, "u0"),
        ((U0, P0), {}, "u0"),
        ((U0, D0), {}, "u0"),
    ],
)
def test_fewest_in_flight_then_name(workers: tuple, in_flight: dict[str, int], expected: str) -> None:
    assert placed(*workers, **in_flight) == expected
    assert placed(*workers, request=PlacementRequest(None), **in_flight) == expected
    assert listed(*workers, **in_flight)[0] == expected


@pytest.mark.parametrize("change", UNREADY_CHANGES)
def test_not_placeable(change: dict[str, bool]) -> None:
    assert placed(replace(P0, **change), P1, D0) == "p1>d0"
    assert placed(P0, replace(D0, **change), D1) == "p0>d1"
    assert placed(P0, replace(D0, **change)) is None
    assert placed(replace(U0, **change), U1) == "u1"


def test_pairs_must_be_warm_as_they_run_now() -> None:
    assert placed(P0, replace(D0, incarnation="d0-2"), D1) == "p0>d1"
    assert placed(replace(P0, warm_pairs=frozenset()), P1, D0) == "p1>d0"
    assert placed(replace(P0, warm_pairs=frozenset()), D0) is None


def test_the_best_prefill_worker_may_have_no_warm_decode_worker() -> None:
    cold = replace(P0, warm_pairs=frozenset({("d0", "d0-0"), ("d9", "d9-1")}))
    assert placed(cold, P1, D0, D1, p1=7, d0=1) == "p1>d1"
    assert placed(cold, P1, U0, D0, p1=7) == "u0"


def test_roles_are_not_mixed_up() -> None:
    assert placed(D0, D1) is placed(P0, P1) is placed() is None
    assert listed(D0, D1) == listed(P0, P1) == listed() == []


@pytest.mark.parametrize(
    ("workers", "expected"),
    [((U0, U1), "u0"), ((U0, P0, D0), "u0"), ((P0, D0), None), ((replace(U0, is_ready=False), P0, D0), None)],
)
def test_adapters_that_act_everywhere_need_a_unified_worker(workers: tuple, expected: str | None) -> None:
    assert placed(*workers, request=EVERYWHERE) == expected
    assert listed(*workers, request=EVERYWHERE)[:1] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("workers", "tried", "failed", "in_flight", "expected"),
    [
        ((P0, P1, D0, D1), [(P0, D0)], ["p0"], {}, "p1>d0"),
        ((P0, P1, D0, D1), [(P0, D0)], ["d0"], {}, "p0>d1"),
        ((P0, P1, D0, D1), [(P0, D0)], ["p0"], {"p1": 9, "d0": 9}, "p1>d1"),  # however busy the others are
        ((P0, P1, D0, D1), [(P0, D0), (P1, D1)], ["d0", "p1"], {}, "p0>d1"),
        ((P0, P1, D0), [(P0, D0)], ["d0"], {}, "p1>d0"),  # a failed worker is the last resort
        ((P0, P1, D0), [(P0, D0), (P1, D0)], ["d0"], {}, None),  # never the same pair again
        ((P0, D0), [(P0, D0)], ["p0"], {}, None),
        ((replace(P0, incarnation="p0-2"), D0), [(P0, D0)], ["p0"], {}, "p0>d0"),  # restarted
        ((P0, D0), [], ["p0", "d0"], {}, "p0>d0"),
        ((P0, P1, D0), [], ["p0", "d0"], {"p1": 9}, "p1>d0"),  # one failed worker is better than two
        ((P0, D0, D1), [], ["p0", "d0"], {"d1": 9}, "p0>d1"),
        ((U0, U1), [(U0, U0)], ["u0"], {"u1": 9}, "u1"),
        ((U0,), [(U0, U0)], ["u0"], {}, None),
        ((U0, P0, D0), [(U0, U0)], ["u0"], {"d0": 9}, "p0>d0"),
        ((U0, P0, D0), [(P0, D0)], ["d0"], {"u0": 9}, "u0"),
        ((U0, P0, P1, D0), [(P0, D0), (U0, U0)], ["d0", "u0"], {}, "p1>d0"),
        ((U0, P0, D0), [], ["u0", "p0", "d0"], {"u0": 9}, "u0"),
    ],
)
def test_a_retry(workers: tuple, tried: list, failed: list, in_flight: dict[str, int], expected: str | None) -> None:
    placements = tuple(Placement(*pair) for pair in tried)
    assert placed(*workers, tried=placements, failed=tuple(failed), **in_flight) == expected


def test_a_retry_leaves_a_prefill_worker_that_is_warm_with_the_failed_decode_worker_only() -> None:
    narrow = replace(P1, warm_pairs=frozenset({("d0", "d0-1")}))
    assert placed(P0, narrow, D0, D1, p0=5) == "p1>d0"
    assert placed(P0, narrow, D0, D1, tried=(Placement(P0, D0),), failed=("d0",), p0=5) == "p0>d1"


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
    assert listed(*workers, request=UNSTORED) == ["p1>d0", "u0"]
    assert placed(*workers, request=UNSTORED) == "p1>d0"
    assert placed(*workers, request=UNSTORED, p1=1) == "u0"
    assert listed(*workers, request=UNSTORED_EVERYWHERE) == ["u0"]
    assert placed(*workers, request=UNSTORED_EVERYWHERE, u0=9) == "u0"
    assert placed(*workers, request=REQUEST) == "p0>d0"
    assert placed(*workers, request=PlacementRequest(None, is_stored=False)) == "p0>d0"
    assert placed(on_disk, replace(in_memory, is_ready=False), D0, request=UNSTORED) is None


@pytest.mark.parametrize(
    ("workers", "in_flight", "expected"),
    [
        ((P0, D0), {}, "p0"),
        ((P0,), {}, "p0"),  # no decode worker, or none that is warm
        ((replace(P0, warm_pairs=frozenset()), D0), {}, "p0"),
        ((P0, P1, D0), {"p0": 1}, "p1"),
        ((P0, U0, D0), {"p0": 1}, "u0"),
        ((D0, D1), {}, None),
    ],
)
def test_without_decode_one_worker_is_enough(workers: tuple, in_flight: dict[str, int], expected: str | None) -> None:
    request = PlacementRequest("sha256:ab", needs_decode=False)
    assert placed(*workers, request=request, **in_flight) == expected
    assert listed(*workers, request=request, **in_flight)[:1] == ([] if expected is None else [expected])


def test_without_decode_an_adapter_that_acts_everywhere_still_needs_a_unified_worker() -> None:
    request = PlacementRequest("sha256:cd", positions="all", needs_decode=False)
    assert placed(P0, D0, request=request) is None
    assert placed(P0, D0, U0, request=request, u0=9) == "u0"


# ---- against an oracle that ranks every pair ------------------------------------------------------------------------


@st.composite
def fleets(draw: Callable) -> FleetState:
    roles = draw(st.lists(st.sampled_from(["prefill", "decode", "unified"]), max_size=8))
    names = [f"{role[0]}{i}" for i, role in enumerate(roles)]
    decodes = [name for name in names if name[0] == "d"]
    all_warm = draw(st.booleans())
    workers = {}
    for name, role in zip(names, roles, strict=True):
        warm = decodes if all_warm else draw(st.lists(st.sampled_from(decodes), unique=True)) if decodes else []
        state = UP if draw(st.integers(0, 5)) else UP | draw(st.sampled_from(UNREADY_CHANGES))
        view = WorkerView(
            name,
            role,
            incarnation=f"{name}-1",
            warm_pairs=frozenset((decode, f"{decode}-1") for decode in warm) if role == "prefill" else frozenset(),
            **state,
        )
        workers[name] = having(view, in_memory_only=["sha256:ab"] if draw(st.booleans()) else [])
    in_flight = {name: draw(st.integers(0, 3)) for name in names if draw(st.booleans())}
    return FleetState(workers, in_flight)


SCORING = PlacementRequest("sha256:ab", needs_decode=False)
REQUESTS = [
    *(PlacementRequest(None), REQUEST, EVERYWHERE, UNSTORED, UNSTORED_EVERYWHERE, SCORING),
    PlacementRequest("sha256:cd", positions="all", needs_decode=False),
    PlacementRequest("sha256:ab", is_stored=False, needs_decode=False),
]


@st.composite
def retries(draw: Callable, fleet: FleetState) -> FailedAttempts:
    failed = FailedAttempts()
    every = all_placements(PlacementRequest(None), fleet)
    for placement in draw(st.lists(st.sampled_from(every), max_size=6)) if every else []:
        failed = failed.with_placement(placement)
    for name in draw(st.lists(st.sampled_from(sorted(fleet.workers)), max_size=4)) if fleet.workers else []:
        failed = failed.with_worker(name)
    return failed


def every_pair(request: PlacementRequest, fleet: FleetState, failed: FailedAttempts) -> list[Placement]:
    """What may take the request, by the rules alone."""
    found = []
    for prefill in fleet.workers.values():
        for decode in fleet.workers.values():
            roles = ("unified",) if request.needs_decode or request.positions == "all" else ("prefill", "unified")
            is_single = prefill is decode and prefill.role in roles
            is_pair = (prefill.role, decode.role) == ("prefill", "decode") and prefill.is_warm_with(decode)
            if (
                (is_single or (is_pair and request.needs_decode and request.positions != "all"))
                and prefill.is_placeable
                and decode.is_placeable
                and (request.is_stored or request.revision_id is None or "sha256:ab" in prefill.residency.memory_only)
                and Placement(prefill, decode).key not in failed.placements
            ):
                found.append(Placement(prefill, decode))
    return found


def in_flight_of(placement: Placement, fleet: FleetState) -> int:
    return sum(fleet.in_flight.get(worker.name, 0) for worker in placement.workers)


def num_failed_of(placement: Placement, failed: FailedAttempts) -> int:
    return sum(worker.name in failed.workers for worker in placement.workers)


@settings(max_examples=300)
@given(st.data(), fleets(), st.sampled_from(REQUESTS))
def test_as_ranking_every_pair(data: st.DataObject, fleet: FleetState, request: PlacementRequest) -> None:
    """Prefill first, then decode: the first of all pairs in that order, then the better of it and a single worker."""
    failed = data.draw(retries(fleet))

    def order(placement: Placement) -> tuple:
        costs = [
            (each.name in failed.workers, fleet.in_flight.get(each.name, 0), each.name) for each in placement.workers
        ]
        return num_failed_of(placement, failed) > 0, *costs

    possible = every_pair(request, fleet, failed)
    pairs = sorted((each for each in possible if not each.is_single), key=order)
    single = sorted((each for each in possible if each.is_single), key=order)
    clean_first = sorted(
        pairs[:1] + single[:1],
        key=lambda each: (
            num_failed_of(each, failed), in_flight_of(each, fleet), each.prefill.name, each.decode.name
        ),
    )  # fmt: skip
    assert place(request, fleet, failed) == next(iter(clean_first), None)


@given(fleets().filter(lambda fleet: fleet.workers), st.sampled_from(REQUESTS))
def test_where_all_are_warm_it_has_the_fewest_requests_of_all(fleet: FleetState, request: PlacementRequest) -> None:
    warm = frozenset((name, worker.incarnation) for name, worker in fleet.workers.items() if worker.role == "decode")
    workers = {
        name: replace(worker, warm_pairs=warm) if worker.role == "prefill" else worker
        for name, worker in fleet.workers.items()
    }
    fleet = FleetState(workers, fleet.in_flight)
    ranked = sorted(
        every_pair(request, fleet, FailedAttempts()),
        key=lambda each: (in_flight_of(each, fleet), each.prefill.name, each.decode.name),
    )
    assert all_placements(request, fleet) == ranked
    assert place(request, fleet) == next(iter(ranked), None)


@given(fleets(), st.sampled_from(REQUESTS))
def test_retries_try_every_placement_once(fleet: FleetState, request: PlacementRequest) -> None:
    failed, tried = FailedAttempts(), []
    while (placement := place(request, fleet, failed)) is not None:
        tried.append(placement.key)
        failed = failed.with_placement(placement).with_worker(placement.decode.name)
    assert sorted(tried) == sorted(each.key for each in all_placements(request, fleet))


def test_its_cost_is_linear_where_all_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts looks at pairs instead of seconds; of 64 x 64 workers there are 4,096."""
    looks: list[str] = []
    is_warm_with = WorkerView.is_warm_with

    def counted(prefill: WorkerView, decode: WorkerView) -> bool:
        looks.append(prefill.name)
        return is_warm_with(prefill, decode)

    monkeypatch.setattr(WorkerView, "is_warm_with", counted)
    warm = frozenset((f"d{i}", "1") for i in range(64))
    workers = [WorkerView(f"p{i}", "prefill", incarnation="1", warm_pairs=warm, **UP) for i in range(64)]
    workers += [WorkerView(f"d{i}", "decode", incarnation="1", **UP) for i in range(64)]
    failed = FailedAttempts()
    for _ in range(3):
        looks.clear()
        placement = place(REQUEST, fleet_of(*workers), failed)
        assert placement is not None
        failed = failed.with_placement(placement).with_worker(placement.prefill.name)
        assert 64 < len(looks) <= 2 * 64 + 2


# ---- what it is made of ---------------------------------------------------------------------------------------------


def test_a_unified_worker_is_one_worker() -> None:
    assert (Placement(U0, U0).workers, Placement(U0, U0).is_single) == ((U0,), True)
    assert (Placement(P0, D0).workers, Placement(P0, D0).is_single) == ((P0, D0), False)


def test_holds_are_released_once() -> None:
    state = InFlightState()
    holds = [state.hold("p0"), state.hold("p0")]
    assert state.counts == {"p0": 2}
    holds[0].release()
    holds[0].release()
    assert state.counts == {"p0": 1}
