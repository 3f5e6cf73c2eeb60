"""Whose turn it is: tenants share tokens, a tenant's models alternate, and a model's commands keep their order."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import MagicMock

import pytest

from training.executor.executor import Executor, ExecutorOptions
from training.executor.operations import Spec
from training.executor.turns import Share, Turns


def order(
    waiting: Mapping[tuple[str, str], set[int]],
    num_turns: int,
    num_tokens: Mapping[str, int] = MappingProxyType({}),
    share_of: Callable[[str], Share] = lambda _tenant: Share(),
) -> list[tuple[str, int]]:
    """(model, command) of the first turns; `waiting`: of (tenant, model). `num_tokens`: of a model's commands."""
    unused: Any = MagicMock()
    turns = Turns(share_of)
    executor = Executor(unused, "demo", Path("unused"), unused, ExecutorOptions(), turns)
    for (tenant, model), seqs in waiting.items():
        executor.add_model(model, tenant, Spec(4, 1), seqs, 1)
    found = []
    for _ in range(num_turns):
        queue = executor._chosen()
        assert queue is not None
        found.append((queue.model, queue.next))
        turns.take(queue.tenant, num_tokens.get(queue.model, 0))
        queue.waiting.discard(queue.next)
        queue.next += 1
    return found


@pytest.mark.parametrize("busy", [2, 50])
def test_a_tenant_with_many_commands_delays_others_by_one(busy: int):
    waiting = {("a", "a1"): set(range(1, busy + 1)), ("a", "a2"): set(range(1, busy + 1)), ("b", "b1"): {1, 2}}
    assert order(waiting, 6) == [("a1", 1), ("b1", 1), ("a2", 1), ("b1", 2), ("a1", 2), ("a2", 2)]


def test_a_model_that_misses_a_command_waits_and_delays_nobody():
    assert order({("a", "a1"): {2, 3}, ("b", "b1"): {1, 2}}, 2) == [("b1", 1), ("b1", 2)]


def test_large_commands_buy_no_larger_share():
    """One tenant with commands of ten times the tokens: it gets every eleventh turn, and half of the tokens.

    The other, which begins later, waits for one of them, and has saved nothing up.
    """
    waiting = {("a", "a1"): set(range(1, 100)), ("b", "b1"): set(range(1, 100))}
    turns = Turns(lambda _tenant: Share())
    for tenant, after in (("a", "a"), ("a", "b"), ("b", "a")):  # who has had a turn, and who is next
        turns.take(tenant, 100)
        assert turns.first(["a"] if after == tenant else ["a", "b"]) == after
    found = order(waiting, 44, {"a1": 1000, "b1": 100})
    assert [index for index, (model, _) in enumerate(found) if model == "a1"] == [0, 11, 22, 33]
    found = order(waiting, 40, {"a1": 100, "b1": 100}, lambda tenant: Share(3.0 if tenant == "b" else 1.0))
    assert sum(model == "b1" for model, _ in found) == 30


def test_a_limit_is_exceeded_by_one_command_at_most_and_binds_no_other():
    now = [0.0]
    turns = Turns(lambda tenant: Share(tokens_per_min=60 if tenant == "a" else None), lambda: now[0])
    turns.take("a", 59)
    assert turns.first(["a"]) == "a"
    turns.take("a", 31)
    assert (turns.wait_s("a"), turns.first(["a"]), turns.first(["a", "b"])) == (31, None, "b")
    now[0] = 30.0
    assert turns.first(["a"]) is None
    now[0] = 31.0
    assert turns.first(["a"]) == "a"
    now[0] = 1e6  # a pause saves up a minute's tokens
    turns.take("a", 90)
    assert turns.wait_s("a") == 31
