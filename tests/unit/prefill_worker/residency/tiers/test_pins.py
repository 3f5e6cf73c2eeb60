"""Pins while calls are in progress. What is pinned after them: `test_memory_only.py`."""

from __future__ import annotations

import pytest

from prefill_worker.residency.errors import PinsExceedBudget
from prefill_worker.residency.tiers.pins import Pins


@pytest.fixture
def pins() -> Pins:
    return Pins(100, lambda: None)


def test_one_that_is_released_during_a_call_keeps_its_room(pins: Pins):
    for _ in range(2):
        with pins.pinning("a", 60):
            pins.release("a")
            with pytest.raises(PinsExceedBudget), pins.pinning("b", 60):
                pass
        assert pins.is_kept("a")


def test_of_calls_that_overlap_one_is_enough(pins: Pins):
    first, second = pins.pinning("a", 60), pins.pinning("a", 60)
    first.__enter__()
    second.__enter__()
    assert not first.__exit__(TimeoutError, TimeoutError(), None)
    assert "a" in pins
    second.__exit__(None, None, None)
    assert pins.is_kept("a")
