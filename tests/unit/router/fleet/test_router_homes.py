"""Rendezvous hashing: homes stay where they are, and every router finds the same."""

from collections import Counter

import pytest

from router.fleet.fleet_state import MAX_HOMES, Homes

KEYS = [f"sha256:{i:064x}" for i in range(10_000)]
WORKERS = [f"worker-{i}" for i in range(64)]


def homes_of(workers: list[str]) -> dict[str, list[str]]:
    homes = Homes(workers)
    orders = {key: [workers[index] for index in homes.order(key)] for key in KEYS}
    assert all(len(order) == len(set(order)) == min(MAX_HOMES, len(workers)) for order in orders.values())
    return orders


def test_two_routers_agree_whatever_order_they_met_the_workers_in() -> None:
    assert homes_of(WORKERS) == homes_of(WORKERS[::-1]) == homes_of(sorted(WORKERS))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker-0", "worker-31", "worker-63"])
def test_a_lost_worker_s_adapters_move_and_no_others(lost: str) -> None:
    before, after = homes_of(WORKERS), homes_of([name for name in WORKERS if name != lost])
    moved = [key for key in KEYS if before[key][0] != after[key][0]]
    assert all(before[key][0] == lost and after[key][0] == before[key][1] for key in moved)
    assert 0 < len(moved) / len(KEYS) <= 1.3 / 64  # 1/64 up to the luck of 10,000 draws
    assert all(
        [name for name in before[key] if name != lost] == after[key][: MAX_HOMES - 1]
        for key in KEYS[:100]
        if lost in before[key]
    )


def test_homes_are_spread_evenly() -> None:
    firsts = Counter(order[0] for order in homes_of(WORKERS).values())
    seconds = Counter(order[1] for order in homes_of(WORKERS).values() if order[0] == "worker-0")
    assert set(firsts) == set(WORKERS)
    assert max(firsts.values()) < 1.4 * len(KEYS) / 64  # four standard deviations are 1.32
    assert len(seconds) > 50  # what a lost worker had goes to all others, not to one neighbour
