"""Placement: which workers take a request, and which never may."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.routers.fleets import DECODES, PREFILLS, UNIFIED, UNREADY_CHANGES, UP, fleet_of, having, warm_with

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import FleetState, Holders, WorkerResidency, WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.placement import placement as module
from router.placement.placement import place, placements
from router.placement.placer import Placer
from router.placement.policy import Policy
from router.placement.request import FailedAttempts, Placement, PlacementRequest, PromptSize
from router.placement.unplaceable import is_gone

D0, D1 = DECODES
P0, P1 = PREFILLS
U0, U1 = UNIFIED
SIZE = PromptSize(100, 200)
ROLES = ("decode", "prefill", "unified")
REQUEST = PlacementRequest("sha256:ab", size=SIZE)
BASE = PlacementRequest(None, size=SIZE)
EVERYWHERE = PlacementRequest("sha256:cd", positions="all", size=SIZE)
POLICY = Policy()


def placed(
    *workers: WorkerView,
    request: PlacementRequest = REQUEST,
    tried: tuple[Placement, ...] = (),
    failed: tuple[str, ...] = (),
    **num_sequences: int,
) -> str | None:
    """The best placement by name. `tried` placements and `failed` workers are those of earlier attempts."""
    attempts = FailedAttempts()
    for placement in tried:
        attempts = attempts.with_placement(placement)
    for name in failed:
        attempts = attempts.with_worker(name)
    placement = place(request, fleet_of(*workers, **num_sequences), POLICY, attempts)
    return placement and str(placement)


def test_few_of_many_readers_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that would only tie with the best nor those that no decode worker is warm with."""
    scored, score = list[int](), module.PrefillCandidates.score
    monkeypatch.setattr(module.PrefillCandidates, "score", lambda own, index: scored.append(index) or score(own, index))
    held = {"resident": ["sha256:ab"]}
    many = [replace(P0, name=f"p{i:02}") for i in range(64)]
    cold = [having(replace(P0, name=f"c{i:02}", warm_pairs=frozenset()), **held) for i in range(9)]
    assert placed(*cold, *many, having(P1, **held), D0) == "p1>d0"
    assert placed(*many, D0, request=BASE) is not None
    base, busy = structs.replace(BASE, nonce=20), {worker.name: 9 for worker in many}
    assert placed(*cold, *many, D0, request=base, **busy) == "p11>d0"
    assert 3 <= len(scored) <= 12


@pytest.mark.parametrize(
    ("workers", "num_sequences", "expected"),
    [
        ((P0, P1, D0, D1), {"p1": 9, "d0": 1}, "p0>d1"),
        ((P0, P1, D0, D1), {"p0": 9, "d0": 2, "d1": 1}, "p1>d1"),
        ((U0, U1), {"u0": 9}, "u1"),
        ((U0, P0, D0), {"u0": 9}, "p0>d0"),
        ((U0, P0, D0), {"p0": 9}, "u0"),
    ],
)
@pytest.mark.parametrize("request_", [REQUEST, BASE])
def test_the_shortest_queue_then_the_emptiest_kv_memory(
    workers: tuple, num_sequences: dict[str, int], expected: str, request_: PlacementRequest
) -> None:
    assert placed(*workers, request=request_, **num_sequences) == expected


def test_equal_workers_are_taken_in_the_revision_s_order() -> None:
    firsts = {placed(P0, P1, D0, request=PlacementRequest(f"sha256:{i:064x}", size=SIZE)) for i in range(20)}
    assert firsts == {"p0>d0", "p1>d0"}
    assert placed(P0, P1, D0) == placed(P1, D0, P0)


def test_the_base_model_is_spread_by_chance() -> None:
    requests = [structs.replace(BASE, nonce=nonce) for nonce in range(4)]
    assert [placed(P0, P1, D0, request=request) for request in requests] == ["p0>d0", "p1>d0"] * 2


def test_a_sequence_of_all_positions_counts_while_it_is_in_flight() -> None:
    placer, fleet = Placer(loads := WorkerLoads(lambda: 0.0)), fleet_of(P0, U0, D0)
    for request, expected in ((EVERYWHERE, 1), (structs.replace(REQUEST, revision_id=None), 0)):
        taken = placer.take(request, Placement(U0, U0))
        assert loads["u0"].num_everywhere == expected
        taken.release()
        taken.release()
        assert loads["u0"].num_everywhere == 0
    assert str(placer.place(EVERYWHERE, fleet, FailedAttempts())) == "u0"


@pytest.mark.parametrize(
    ("workers", "tried", "failed", "num_sequences", "expected"),
    [
        ((P0, P1, D0, D1), [(P0, D0)], ["p0"], {"p1": 50, "d0": 50}, "p1>d1"),  # however busy the others are
        ((P0, P1, D0, D1), [(P0, D0), (P1, D1)], ["d0", "p1"], {}, "p0>d1"),
        ((P0, P1, D0), [(P0, D0)], ["d0"], {}, "p1>d0"),  # a failed worker is the last resort
        ((P0, D0), [(P0, D0)], ["p0"], {}, None),  # never the same pair again
        ((replace(P0, incarnation="p0-2"), D0), [(P0, D0)], ["p0"], {}, "p0>d0"),  # restarted
        ((P0, P1, D0), [], ["p0", "d0"], {"p1": 50}, "p1>d0"),  # one failed worker is better than two
        ((U0, P0, D0), [(P0, D0)], ["d0"], {"u0": 50}, "u0"),
        ((U0, P0, D0), [], ["u0", "p0", "d0"], {"u0": 50}, "u0"),
    ],
)
def test_a_retry(
    workers: tuple, tried: list, failed: list, num_sequences: dict[str, int], expected: str | None
) -> None:
    pairs = tuple(Placement(*pair) for pair in tried)
    assert placed(*workers, tried=pairs, failed=tuple(failed), **num_sequences) == expected


UNSTORED = PlacementRequest("sha256:ab", is_stored=False, size=SIZE)
UNSTORED_EVERYWHERE = PlacementRequest("sha256:ab", positions="all", is_stored=False, size=SIZE)


def test_what_no_store_has_goes_to_who_has_it() -> None:
    in_memory = having(P1, in_memory_only=["sha256:ab"])  # the engine has not got it back yet
    in_engine = having(U0, in_memory_only=["sha256:ab"], resident=["sha256:ab"])
    on_disk, other = having(P0, on_disk=["sha256:ab"]), having(U1, in_memory_only=["sha256:cd"])
    fleet = fleet_of(on_disk, in_memory, in_engine, other, D0)
    assert list(map(str, placements(UNSTORED, fleet))) == ["p1>d0", "u0"]
    assert list(map(str, placements(UNSTORED_EVERYWHERE, fleet))) == ["u0"]


@pytest.mark.parametrize("change", UNREADY_CHANGES)
def test_a_revision_is_gone_only_when_all_say_so(change: dict[str, bool]) -> None:
    def gone(*workers: WorkerView, request: PlacementRequest = UNSTORED) -> bool:
        return is_gone(request, fleet_of(*workers))

    has_it = having(P0, in_memory_only=["sha256:ab"])
    assert gone(P0, U0, D0)
    assert not gone(P0, U0, D0, request=REQUEST)
    assert not gone(has_it, U0, D0)
    assert not gone(replace(has_it, **change), U0, D0)
    assert gone(replace(P0, **change), U0, D0) is change.get("is_connected", True)  # it may have it
    assert gone(P0, U0, replace(D0, **change))  # which cannot
    assert gone(has_it, U0, request=UNSTORED_EVERYWHERE)
    assert gone(replace(P0, **change), U0, request=UNSTORED_EVERYWHERE)
    assert not is_gone(
        UNSTORED, FleetState({}, WorkerLoads(lambda: 0.0), Holders(), is_settled=False)
    )  # who has it may be found


# ---- against what the rules alone allow -----------------------------------------------------------------------------


REVISIONS = ["sha256:ab", "sha256:cd"]


def random_fleet(random: Random, most: int) -> FleetState:
    """Workers of different speeds, some unready, with sequences in flight."""
    names = {each: [f"{each[0]}{i:02}" for i in range(random.randint(0, most))] for each in ROLES}
    holders, loads, workers = Holders(), WorkerLoads(lambda: 0.0), {}
    share = random.choice([0.02, 0.1, 0.3])  # of the workers that have a revision in a tier
    for name, role in [(name, each) for each in ROLES for name in names[each]]:
        residency = WorkerResidency(holders)
        for tier in ("resident", "on_disk", "in_memory_only"):
            has = [each for each in REVISIONS if random.random() < share]
            residency.apply(control.ResidencyDelta(**{tier: has}))
        incarnation = f"{name}-{random.choice('1112')}"  # a few have restarted, and no pair with them is warm
        state = UP | (random.choice(UNREADY_CHANGES) if random.random() < 0.1 else {})
        warm = [decode for decode in names["decode"] if random.random() < 0.75] if role == "prefill" else []
        workers[name] = warm_with(WorkerView(name, role, incarnation=incarnation, residency=residency, **state), *warm)
        load = loads[name]
        load.s_per_token = random.choice([0.0002, 0.0002, 0.0001, 0.00025])
        for _ in range(random.randint(0, 3)):
            tokens, revision_id = random.choice([0, 500, 1500, 10_000]), random.choice([None, None, *REVISIONS])
            is_everywhere = role == "unified" and random.random() < 0.3
            loads.add(name, prompt_tokens=tokens, kv_tokens=900, revision_id=revision_id, is_everywhere=is_everywhere)
        load.max_kv_tokens, load.reported_kv_tokens = 10_000, random.choice([0, 4000, 8000])
    return FleetState(workers, loads, holders)


RANDOMS = st.integers(0, 2**32).map(Random)
FLEETS = st.builds(random_fleet, RANDOMS, st.sampled_from([3, 12]))  # more than are all scored, too
REQUESTS = st.builds(
    PlacementRequest,
    st.sampled_from([None, "sha256:ab", "sha256:cd"]),
    positions=st.sampled_from(["prefill", "all"]),
    is_stored=st.booleans(),
    needs_decode=st.booleans(),
    size=st.builds(PromptSize, st.integers(0, 5000), st.integers(0, 20_000)),
    demand=st.floats(0, 20),
    nonce=st.integers(0, 2**32 - 1),
)


@st.composite
def retries(draw: Callable, fleet: FleetState) -> FailedAttempts:
    failed = FailedAttempts()
    every = list(placements(BASE, fleet))
    for placement in draw(st.lists(st.sampled_from(every), max_size=6)) if every else []:
        failed = failed.with_placement(placement)
    for name in draw(st.lists(st.sampled_from(sorted(fleet.workers)), max_size=4)) if fleet.workers else []:
        failed = failed.with_worker(name)
    return failed


def allowed(request: PlacementRequest, fleet: FleetState, failed: FailedAttempts) -> list[Placement]:
    """What may take the request, by the rules alone."""
    revision_id, needs_pair = request.revision_id, request.needs_decode and request.positions != "all"
    alone = ("unified",) if request.needs_decode or request.positions == "all" else ("prefill", "unified")
    found = []
    for prefill in fleet.workers.values():
        for decode in fleet.workers.values():
            is_single = prefill is decode and prefill.role in alone
            is_pair = (prefill.role, decode.role) == ("prefill", "decode") and (
                decode.name,
                decode.incarnation,
            ) in prefill.warm_pairs
            residency = prefill.residency
            has_revision = revision_id in residency.memory_only or revision_id in residency.host
            if (
                (is_single or (is_pair and needs_pair))
                and prefill.is_placeable
                and decode.is_placeable
                and (request.is_stored or revision_id is None or has_revision)
                and Placement(prefill, decode).key not in failed.placements
            ):
                found.append(Placement(prefill, decode))
    return found


@pytest.mark.slow
@settings(max_examples=400)
@given(st.data(), FLEETS, REQUESTS)
def test_only_what_the_rules_allow_and_something_whenever_they_do(
    data: st.DataObject, fleet: FleetState, request: PlacementRequest
) -> None:
    failed = data.draw(retries(fleet))
    possible = allowed(request, fleet, failed)
    placement = place(request, fleet, POLICY, failed)
    if not possible:
        assert placement is None
        return
    assert placement in possible

    def num_failed(each: Placement) -> int:
        return len({each.prefill.name, each.decode.name} & failed.workers)

    fewest_failed = min(map(num_failed, possible))
    assert num_failed(placement) == fewest_failed or (fewest_failed and num_failed(placement) <= 1)


@given(FLEETS, REQUESTS)
def test_all_placements_are_listed(fleet: FleetState, request: PlacementRequest) -> None:
    keys = sorted(each.key for each in allowed(request, fleet, FailedAttempts()))
    assert sorted(each.key for each in placements(request, fleet)) == keys


@pytest.mark.slow
@given(FLEETS, REQUESTS)
def test_retries_try_every_placement_once(fleet: FleetState, request: PlacementRequest) -> None:
    failed, tried = FailedAttempts(), []
    while (placement := place(request, fleet, POLICY, failed)) is not None:
        tried.append(placement.key)
        failed = failed.with_placement(placement).with_worker(placement.decode.name)
    assert sorted(tried) == sorted(each.key for each in placements(request, fleet))


SIZES = [
    PromptSize(),
    PromptSize(500, 700),
    PromptSize(1000, 4000, (1, 2, 3), 300.0),
    PromptSize(600, 900, (1, 4), 300.0),
]


@settings(max_examples=500)
@given(RANDOMS)
def test_the_choice_is_that_of_scoring_every_reader(random: Random) -> None:
    """Of many readers only some are scored. The winner is the same, equal costs included."""
    fleet = random_fleet(random, most=20)
    policy = Policy()
    policy.load_s["disk"] = random.choice([0.05, 2.0])
    request = PlacementRequest(
        random.choice([None, *REVISIONS, f"{REVISIONS[0]}x0.5"]),
        positions=random.choice(["prefill", "prefill", "all"]),
        is_stored=random.random() < 0.8,
        needs_decode=random.random() < 0.8,
        size=random.choice(SIZES),
        demand=random.choice([0.0, 1.0, 3.0]),
        nonce=random.getrandbits(32),
    )
    for worker in fleet.readers[:: random.randint(1, 5)]:
        policy.prefixes.add(structs.replace(request, size=random.choice(SIZES)), worker.name, worker.incarnation)
    placement = place(request, fleet, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW_READERS", len(fleet.readers))
        assert placement == place(request, fleet, policy)
