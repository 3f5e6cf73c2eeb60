"""Whose turn it is: tenants alternate, and so do the models of a tenant; a model's commands keep their order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from training.executor.executor import Executor, ExecutorOptions
from training.executor.operations import Spec


def order(waiting: Mapping[tuple[str, str], set[int]], num_turns: int) -> list[tuple[str, int]]:
    """(model, command) of the first turns; `waiting`: of (tenant, model)."""
    unused: Any = None
    executor = Executor(unused, "demo", Path("unused"), unused, ExecutorOptions())
    for (tenant, model), seqs in waiting.items():
        executor.add_model(model, tenant, Spec(4, 1), seqs, 1)
    found = []
    for _ in range(num_turns):
        queue = executor._chosen()
        assert queue is not None
        found.append((queue.model, queue.next))
        queue.waiting.discard(queue.next)
        queue.next += 1
    return found


@pytest.mark.parametrize("busy", [2, 50])
def test_a_tenant_with_many_commands_delays_others_by_one(busy: int):
    waiting = {("a", "a1"): set(range(1, busy + 1)), ("a", "a2"): set(range(1, busy + 1)), ("b", "b1"): {1, 2}}
    assert order(waiting, 6) == [("a1", 1), ("b1", 1), ("a2", 1), ("b1", 2), ("a1", 2), ("a2", 2)]


def test_a_model_that_misses_a_command_waits_and_delays_nobody():
    assert order({("a", "a1"): {2, 3}, ("b", "b1"): {1, 2}}, 2) == [("b1", 1), ("b1", 2)]
