"""Each scorer by itself: a table of what its candidates cost, in seconds."""

from collections.abc import Callable

import pytest
from msgspec import structs
from support.routers.fleets import DECODES, MAX_KV_TOKENS, PREFILLS, UNIFIED, fleet_of, having

from cluster.config.router import SloConfig
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.worker_loads import Spent, WorkerLoads
from router.placement.placement import place
from router.placement.placer import Placer
from router.placement.policy import Candidate, Choice, Policy
from router.placement.request import Placement, PlacementRequest, PromptSize

P0, P1 = PREFILLS
U0, _ = UNIFIED
SIZE = PromptSize(1000, 2000)  # read in 0.2 s at a new worker's rate
REQUEST = PlacementRequest("sha256:ab", size=SIZE)
BASE = PlacementRequest(None, size=SIZE)


def cost_s(
    scorer: Callable[[Candidate, Choice], float],
    worker: WorkerView = P0,
    request: PlacementRequest = REQUEST,
    *,
    num_sequences: int = 0,
    rank: int = 0,
    has_revision: bool = False,
    num_homes: int = 1,
    num_wanted: int = 1,
    num_copies: int = 0,
) -> float:
    load = fleet_of(worker, **{worker.name: num_sequences}).loads[worker.name]
    candidate = Candidate(worker, load, rank, has_revision)
    return round(scorer(candidate, Choice(request, 0.2, 1.0, num_homes, num_wanted, num_copies)), 6)


@pytest.mark.parametrize("scale", ["", "x0.5"])
def test_residency(scale: str) -> None:
    """A disk has a revision for all its scales."""
    placer, request = Placer(WorkerLoads()), PlacementRequest(f"sha256:ab{scale}", size=SIZE)
    times, scorer = placer.policy.load_s, placer.policy.residency_s
    on_disk = having(P0, on_disk=["sha256:ab"])
    assert cost_s(scorer, P0, request) == times["store"] > cost_s(scorer, on_disk, request) == times["disk"] > 0
    assert cost_s(scorer, P0, request, has_revision=True) == cost_s(scorer, request=BASE) == 0
    for _ in range(100):
        placer.loaded(placer.take(request, Placement(P0, P0)), 2.0)
        placer.loaded(placer.take(request, Placement(on_disk, on_disk)), 0.001)
    assert cost_s(scorer, P0, request) == pytest.approx(2.0, rel=0.01)
    assert cost_s(scorer, on_disk, request) == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize(
    ("rank", "num_homes", "num_copies", "num_wanted", "has_revision", "num_sequences", "expected"),
    [
        (0, 1, 1, 1, True, 5, 0.0),  # its home, up to the bound of one second
        (0, 1, 1, 1, True, 8, 0.6),  # full
        (9, 1, 1, 1, True, 0, 0.2),  # a copy that is not at home
        (9, 10, 1, 1, True, 0, 0.0),
        (0, 1, 0, 1, False, 0, 0.0),  # the first copy: at one of three homes
        (2, 1, 0, 1, False, 0, 0.0),
        (3, 1, 0, 1, False, 0, 0.8),
        (3, 4, 0, 1, False, 0, 0.0),  # or at one that stands in for a full one
        (0, 1, 1, 1, False, 0, 3.0),  # one copy too many, even at home
        (1, 2, 1, 2, False, 0, 0.0),  # demand asks for it
    ],
)
def test_home(
    rank: int, num_homes: int, num_copies: int, num_wanted: int, has_revision: bool, num_sequences: int, expected: float
) -> None:
    common = {"num_homes": num_homes, "num_copies": num_copies, "num_wanted": num_wanted}
    given = {"rank": rank, "has_revision": has_revision, "num_sequences": num_sequences, **common}
    assert cost_s(Policy().home_s, **given) == expected
    assert cost_s(Policy().home_s, request=BASE, **given) == 0


def test_a_worker_that_generates_for_adapters_of_all_positions_is_nobody_else_s_home() -> None:
    fleet, scorer = fleet_of(U0), Policy().home_s
    fleet.loads.add("u0", is_everywhere=True)

    def cost_s(request: PlacementRequest, has_revision: bool = False) -> float:
        candidate = Candidate(U0, fleet.loads["u0"], 0, has_revision)
        return round(scorer(candidate, Choice(request, 0.2, 1.0, 1)), 6)

    everywhere = structs.replace(REQUEST, positions="all")
    assert (cost_s(REQUEST), cost_s(REQUEST, has_revision=True), cost_s(BASE)) == (0.8, 0.2, 0.8)
    assert cost_s(everywhere) == cost_s(everywhere, has_revision=True) == 0


def test_prefix() -> None:
    policy = Policy()
    index, scorer = policy.prefixes, policy.prefix_s
    long = structs.replace(REQUEST, size=PromptSize(1000, 2000, (1, 2, 3), 250.0))
    index.add(structs.replace(long, size=PromptSize(500, 500, (1, 2), 250.0)), "p0", P0.incarnation)
    assert cost_s(scorer, P0, long) == -0.1
    assert cost_s(scorer, P1, long) == 0
    assert cost_s(scorer, P0, REQUEST) == 0


def test_room() -> None:
    scorer = Policy().generation_s
    huge = structs.replace(REQUEST, size=PromptSize(1000, MAX_KV_TOKENS))
    assert cost_s(scorer, U0) == cost_s(scorer, U0, huge) == 0
    assert cost_s(scorer, U0, huge, num_sequences=50) == 0.5 + cost_s(scorer, U0, num_sequences=50)
    assert cost_s(scorer, P0, huge, num_sequences=50) == 0  # its decode worker needs the room


@pytest.mark.parametrize(("worker", "answer_tokens", "each_s"), [(U0, 16, 0.0), (U0, 17, 0.4), (P0, 17, 0.0)])
def test_pace(worker: WorkerView, answer_tokens: int, each_s: float) -> None:
    """Reading this prompt takes 0.2 s, and each sequence that a unified worker generates waits meanwhile."""
    loads, choice = fleet_of(worker).loads, Choice(REQUEST, 0.2, 1.0, 1)
    for number in range(3):
        cost_s = Policy().generation_s(Candidate(worker, loads[worker.name], 0, True), choice)
        assert cost_s == pytest.approx(number * each_s)
        loads.add(worker.name, prompt_tokens=100, kv_tokens=100 + answer_tokens)


@pytest.mark.parametrize(
    ("num_generating", "gap_s", "answer_tokens", "spared_s"),
    [
        (0, 0.02, 128, 0.0),
        (10, 0.02, 128, 2.0),  # half of 2 seconds for each of 0.2 s: strain is 1
        (10, 0.02, 512, 3.5),  # longer answers: waits are spread over more tokens
        (10, 0.02, 64, 0.0),
        (10, 0.005, 128, 0.0),  # a step alone misses the objective
        (10, 0.1, 128, 3.74),
    ],
)
def test_pace_beside_prefill_workers(num_generating: int, gap_s: float, answer_tokens: int, spared_s: float) -> None:
    """It weighs as much of the time to the first token as waits take of the objective for a token."""
    policy = Policy(SloConfig(first_token_s=1.0, event_gap_s=gap_s))
    policy.answer_tokens = answer_tokens
    fleet = fleet_of(P0, *UNIFIED)
    generate(fleet, 0.00828125, u0=num_generating + 3, u1=num_generating)
    assert policy.spared_beside_prefill(fleet.unified_loads, 0.2) == pytest.approx(spared_s, abs=0.01)


def generate(fleet: FleetState, step_s: float, **num_sequences: int) -> None:
    """Unified workers have so many sequences whose prompts were read."""
    for name, number in num_sequences.items():
        load = fleet.loads[name]
        for spent in (Spent(0, 1, 0), Spent(0, 41, round(40 * step_s * 1e6))):
            load.report(spent.decode_steps, used_kv_tokens=0, max_kv_tokens=MAX_KV_TOKENS, spent=spent)
        for _ in range(number):
            fleet.loads.add(name, kv_tokens=200)


def test_beside_prefill_workers_unified_ones_get_what_their_pace_allows() -> None:
    """A pair's queue and the waits of a unified worker's sequences are compared by the objectives."""

    def chosen(*workers: WorkerView, gap_s: float) -> str:
        fleet = fleet_of(*workers, p0=4)
        generate(fleet, 0.008, u0=10, u1=10)
        placement = place(REQUEST, fleet, Policy(SloConfig(first_token_s=1.0, event_gap_s=gap_s)))
        return str(placement)

    d0, _ = DECODES
    assert chosen(P0, d0, *UNIFIED, gap_s=0.1).startswith("u")
    assert chosen(P0, d0, *UNIFIED, gap_s=0.009) == "p0>d0"


def test_the_cost_is_the_sum_of_all_scorers() -> None:
    policy, loads = Policy(), fleet_of(U0).loads
    loads.add("u0", prompt_tokens=100, kv_tokens=1000)
    long = structs.replace(REQUEST, size=PromptSize(1000, 2000, (1, 2, 3), 250.0))
    policy.prefixes.add(long, "u0", U0.incarnation)
    candidate, choice = Candidate(U0, loads["u0"], 9, False), Choice(long, 0.2, 1.0, 1)
    names = {name for name in vars(Policy) if name.endswith("_s")} - {"cost_s", "least_s"}
    costs = [getattr(policy, name)(candidate, choice) for name in names]
    assert len(costs) == 5
    assert all(costs)
    assert policy.cost_s(candidate, choice) == pytest.approx(sum(costs))
