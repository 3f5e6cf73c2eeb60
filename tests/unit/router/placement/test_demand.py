"""The demand for revisions, by which homes become more and fewer."""

from __future__ import annotations

import pytest

from router.placement import request
from router.placement.request import Demand


def test_steady_requests_come_to_their_rate():
    seen = Demand()
    for tenth in range(1, 1001):
        seen.observe("r", 0.05, tenth / 10)  # half a second of prefill per second
    assert seen.seconds_per_s("r", 100.0) == pytest.approx(0.5, rel=0.02)


def test_demand_falls_when_requests_stop():
    seen = Demand()
    seen.observe("r", 10.0, 0.0)
    values = [seen.seconds_per_s("r", float(now)) for now in (0, 10, 20, 60)]
    assert values[0] == pytest.approx(1.0)
    assert values[1] == pytest.approx(values[0] / 2.718, rel=0.01)
    assert values == sorted(values, reverse=True)
    assert values[3] < 0.01


def test_the_revision_without_requests_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "_MAX_REVISIONS", 2)
    seen = Demand()
    for now, revision_id in enumerate(("a", "b", "a", "c")):
        seen.observe(revision_id, 1.0, float(now))
    assert [seen.seconds_per_s(each, 3.0) > 0 for each in "abc"] == [True, False, True]
    assert seen.seconds_per_s("never seen", 3.0) == 0.0
