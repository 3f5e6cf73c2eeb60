"""Pins: what is pinned while calls are in progress, and after them."""

from __future__ import annotations

import pytest

from prefill_worker.residency.errors import PinsExceedBudget
from prefill_worker.residency.tiers.pins import Pins


class Unpinned:
    """Counts how often a revision was pinned no more."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def unpinned() -> Unpinned:
    return Unpinned()


@pytest.fixture
def pins(unpinned: Unpinned) -> Pins:
    return Pins(100, unpinned)


def keep(pins: Pins, revision_id: str, num_bytes: int) -> None:
    with pins.pinning(revision_id, num_bytes):
        pass


@pytest.mark.parametrize("was_kept", [True, False])
def test_a_call_that_fails_leaves_what_was_before(pins: Pins, unpinned: Unpinned, was_kept: bool):
    if was_kept:
        keep(pins, "a", 60)
    with pytest.raises(ZeroDivisionError), pins.pinning("a", 60):
        raise ZeroDivisionError
    assert (list(pins), unpinned.count) == ((["a"], 0) if was_kept else ([], 1))


def test_one_that_is_released_during_a_call_keeps_its_room(pins: Pins):
    keep(pins, "a", 60)
    with pins.pinning("a", 60):
        pins.release("a")
        with pytest.raises(PinsExceedBudget):
            keep(pins, "b", 60)
    assert pins.is_kept("a")


def test_of_calls_that_overlap_one_is_enough(pins: Pins):
    first, second = pins.pinning("a", 60), pins.pinning("a", 60)
    first.__enter__()
    second.__enter__()
    assert not first.__exit__(TimeoutError, TimeoutError(), None)
    assert "a" in pins
    second.__exit__(None, None, None)
    assert pins.is_kept("a")
