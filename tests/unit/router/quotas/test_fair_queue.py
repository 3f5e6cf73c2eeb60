"""Who is next: shares by weight and tokens, the sparse tenant first."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.quotas.fair_queue import QUANTUM, FairQueue


def fill(queue: FairQueue[str], tenant: str, count: int, cost: float, weight: float = 1.0) -> None:
    for number in range(count):
        queue.push(tenant, weight, f"{tenant}{number}", cost)


def served(queue: FairQueue[str], count: int) -> list[str]:
    return [queue.pop() for _ in range(count)]


def test_one_tenant_is_served_in_order():
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 4, 10 * QUANTUM)
    assert served(queue, 4) == ["a0", "a1", "a2", "a3"]
    assert queue.pop() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "costs"),
    [
        ({"a": 1, "b": 1}, {"a": 5000, "b": 50}),  # by tokens, not by requests
        ({"a": 0.1, "b": 1, "c": 2}, {"a": 100, "b": 3000, "c": 800}),
    ],
)
def test_tenants_that_always_wait_share_tokens_by_weight(weights: dict[str, float], costs: dict[str, float]):
    queue: FairQueue[str] = FairQueue()
    for tenant, weight in weights.items():
        fill(queue, tenant, 20_000, costs[tenant], weight)
    tokens: Counter[str] = Counter()
    while sum(tokens.values()) < 2_000_000:
        (item,) = served(queue, 1)
        tokens[item[0]] += int(costs[item[0]])
    total = sum(tokens.values())
    for tenant, weight in weights.items():
        assert tokens[tenant] / total == pytest.approx(weight / sum(weights.values()), rel=0.05)


def test_a_tenant_that_begins_to_wait_is_next():
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 100, 100)
    fill(queue, "b", 100, 100)
    served(queue, 27)  # both have had the quantum of a new one
    fill(queue, "c", 1, 100)
    assert served(queue, 1) == ["c0"]
    fill(queue, "c", 50, 100)  # it has the rest of its quantum, and is not new again
    found = [item[0] for item in served(queue, 24)]
    assert found[:10] == ["c"] * 10
    assert set(found[10:]) == {"a", "b"}


def test_a_tenant_that_comes_again_at_once_is_not_new_again():
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 100, 100)
    served(queue, 11)  # the quantum of a new one
    for number in range(5):
        fill(queue, "b", 1, 100)
        assert (served(queue, 1) == ["b0"]) is (number == 0)
        assert served(queue, 1)[0].startswith("a")  # and no other request of b was there


def test_what_a_request_turned_out_to_cost_is_paid_later():
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 100, QUANTUM)
    fill(queue, "b", 100, QUANTUM)
    served(queue, 2)
    queue.settle("a", 10 * QUANTUM)
    assert Counter(item[0] for item in served(queue, 12))["b"] >= 10
    queue.settle("nobody", 5)


def test_huge_debts_take_no_time():
    queue: FairQueue[str] = FairQueue()
    fill(queue, "a", 2, 1e12, 0.001)
    fill(queue, "b", 2, 1e12, 0.001)
    assert sorted(served(queue, 4)) == ["a0", "a1", "b0", "b1"]


requests = st.tuples(st.sampled_from("abcd"), st.floats(1, 5000))
steps = st.lists(st.one_of(requests, st.just("pop"), st.just("remove"), st.floats(-3000, 3000)), max_size=80)


@given(steps)
@settings(max_examples=200)
def test_every_request_is_served_once_or_removed(steps):
    queue: FairQueue[int] = FairQueue()
    waiting = {}
    for number, step in enumerate(steps):
        if step == "pop":
            found = queue.pop()
            assert (found is None) == (not waiting)
            if found is not None:
                del waiting[found]
        elif step == "remove":
            if waiting:
                left = waiting.pop(number := max(waiting))
                queue.remove(left, number)
                queue.remove(left, number)  # nothing more
        elif isinstance(step, float):
            queue.settle("a", step)
        else:
            tenant, cost = step
            queue.push(tenant, 1.0, number, cost)
            waiting[number] = tenant
        assert len(queue) == len(waiting)
        assert queue._flows.keys() == {flow.tenant for flow in (*queue._new, *queue._old)}
    while (found := queue.pop()) is not None:
        del waiting[found]
    assert not waiting
    assert not queue._flows  # nothing is kept of tenants that are gone
