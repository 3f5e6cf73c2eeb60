"""The busiest adapters, with a bounded number of names."""

from __future__ import annotations

import pytest

from router import collectors
from router.collectors import OTHER, BusiestAdapters
from router.metrics import Metrics


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_rates_are_those_of_the_last_minute(clock: Clock) -> None:
    adapters = BusiestAdapters(clock)
    for _ in range(60):
        adapters.count("a")
    assert adapters.rates() == {"a": 1.0}
    clock.now += 75  # of the minute before, three quarters are left
    for _ in range(30):
        adapters.count("b")
    assert adapters.rates() == {"a": pytest.approx(0.75), "b": pytest.approx(0.5)}
    clock.now += 120
    assert adapters.rates() == {}


def test_only_twenty_have_a_name_and_no_request_is_lost(clock: Clock) -> None:
    adapters = BusiestAdapters(clock)
    for number in range(50):
        for _ in range(number + 1):
            adapters.count(f"a{number}")
    rates = adapters.rates()
    assert len(rates) == 21
    assert set(rates) == {f"a{number}" for number in range(30, 50)} | {OTHER}
    assert sum(rates.values()) == pytest.approx(50 * 51 / 2 / 60)


def test_memory_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "_MAX_NAMES", 3)
    adapters = BusiestAdapters(clock)
    for number in range(100):
        adapters.count(f"a{number}")
    adapters.count("a1")  # known names are still counted
    assert adapters.rates() == {"a0": 1 / 60, "a1": pytest.approx(2 / 60), "a2": 1 / 60, OTHER: pytest.approx(97 / 60)}


def test_the_page_escapes_hostile_names() -> None:
    metrics = Metrics()
    metrics.busiest_adapters.count('x"} 1\nevil 2')
    assert r'prelude_router_adapter_request_rate{adapter="x\"} 1\nevil 2"}' in metrics.page().decode()
