"""Pins and their owners."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from prefill_worker.residency.errors import PinsExceedBudget
from prefill_worker.residency.tiers.pins import PinOwner, Pins

OPERATOR, PUSH = "acme", PinOwner.PUSH
CALL, OTHER_CALL = object(), object()


class Unpinned:
    """Counts how often the last owner of a revision has released it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def pins_of(budget_bytes: int) -> tuple[Pins, Unpinned]:
    unpinned = Unpinned()
    return Pins(budget_bytes, unpinned), unpinned


@pytest.mark.parametrize(
    ("added", "released", "left"),
    [
        ([OPERATOR], [], {OPERATOR}),
        ([OPERATOR], [OPERATOR], set()),
        ([OPERATOR, OPERATOR], [OPERATOR], set()),  # owners, not counts
        ([OPERATOR, PUSH], [PUSH], {OPERATOR}),
        ([OPERATOR, PUSH], [OPERATOR], {PUSH}),
        ([OPERATOR, PUSH], [OPERATOR, PUSH], set()),
        ([PUSH], [OPERATOR], {PUSH}),
        ([CALL, OTHER_CALL], [CALL], {OTHER_CALL}),
        ([CALL, OPERATOR, OTHER_CALL], [CALL, OTHER_CALL], {OPERATOR}),
        ([CALL, OPERATOR], [OPERATOR, PUSH], {CALL}),
        ([], [OPERATOR], set()),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_revision_is_pinned_until_its_last_owner_releases_it(
    added: list[Hashable], released: list[Hashable], left: set[Hashable], at_once: bool
):
    pins, unpinned = pins_of(100)
    for owner in added:
        pins.add("a", 60, owner)
    for owners in [released] if at_once else [[each] for each in released]:
        pins.release("a", *owners)
    assert pins == ({"a": left} if left else {})
    assert pins.num_bytes == (60 if left else 0)
    assert unpinned.count == (1 if added and not left else 0)
    for owner in (OPERATOR, PUSH, CALL, OTHER_CALL):
        assert pins.is_owned("a", owner) == (owner in left)


@pytest.mark.parametrize(
    ("pinned", "num_bytes", "fits"),
    [
        ({}, 100, True),
        ({}, 101, False),
        ({"b": 40}, 60, True),
        ({"b": 40}, 61, False),
        ({"b": 40, "c": 60}, 1, False),
        ({"a": 60, "b": 40}, 60, True),  # a second owner takes no room
        ({"a": 60, "b": 40}, 61, False),
    ],
)
def test_the_budget(pinned: dict[str, int], num_bytes: int, fits: bool):
    pins, _ = pins_of(100)
    for revision_id, size in pinned.items():
        pins.add(revision_id, size, OPERATOR)
    before = dict(pins)
    if fits:
        pins.add("a", num_bytes, PUSH)
        assert pins.is_owned("a", PUSH)
        assert pins.num_bytes == sum({**pinned, "a": num_bytes}.values())
        return
    others = sum(pinned.values()) - pinned.get("a", 0)
    with pytest.raises(PinsExceedBudget, match=rf"takes {num_bytes} bytes .* and {others} are .*host_bytes of 100"):
        pins.add("a", num_bytes, PUSH)
    assert pins == before
    assert pins.num_bytes == sum(pinned.values())


def test_turns_are_of_the_tenants_that_own_pins():
    pins, _ = pins_of(100)
    for revision_id, owners in {"a": [PUSH], "b": ["acme"], "c": ["acme", PUSH], "d": ["beta", CALL]}.items():
        for owner in owners:
            pins.add(revision_id, 10, owner)
    assert [pins.tenant_of(each) for each in pins] == ["", "acme", "acme", "beta"]
    pins.release("c", *pins.tenants_of("c"))
    assert pins["c"] == {PUSH}


class TestPinning:
    def test_the_owner_has_it_after_the_call(self):
        pins, unpinned = pins_of(100)
        with pins.pinning("a", 60, OPERATOR):
            assert "a" in pins
            assert not pins.is_owned("a", OPERATOR)
        assert pins == {"a": {OPERATOR}}
        assert unpinned.count == 0

    @pytest.mark.parametrize("before", [set(), {OPERATOR}, {PUSH}, {OPERATOR, PUSH}])
    def test_a_call_that_fails_leaves_what_was_before(self, before: set[Hashable]):
        pins, unpinned = pins_of(100)
        for owner in before:
            pins.add("a", 60, owner)
        with pytest.raises(ZeroDivisionError), pins.pinning("a", 60, OPERATOR):
            raise ZeroDivisionError
        assert pins == ({"a": before} if before else {})
        assert unpinned.count == (0 if before else 1)

    def test_it_is_pinned_while_the_owners_are_released(self):
        pins, unpinned = pins_of(100)
        pins.add("a", 60, OPERATOR)
        with pins.pinning("a", 60, PUSH):
            pins.release("a", OPERATOR, PUSH)
            assert "a" in pins
            with pytest.raises(PinsExceedBudget):
                pins.add("b", 60, OPERATOR)
        assert pins == {"a": {PUSH}}
        assert unpinned.count == 0

    def test_calls_that_overlap(self):
        pins, _ = pins_of(100)
        first, second = pins.pinning("a", 60, OPERATOR), pins.pinning("a", 60, OPERATOR)
        first.__enter__()
        second.__enter__()
        assert not first.__exit__(TimeoutError, TimeoutError(), None)
        assert len(pins["a"]) == 1
        second.__exit__(None, None, None)
        assert pins == {"a": {OPERATOR}}

    def test_no_room_for_it(self):
        pins, unpinned = pins_of(100)
        with pytest.raises(PinsExceedBudget), pins.pinning("a", 101, OPERATOR):
            raise AssertionError("not entered")
        assert pins == {}
        assert unpinned.count == 0
