"""`python -m bench.policies`: every arm is measured, and memory is what is planned."""

import argparse

import pytest

from bench import policies

pytestmark = pytest.mark.slow


def test_all_arms_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policies, "_LENGTHS", (8, 16))
    options = argparse.Namespace(
        model="tiny", device="cpu", rank=2, policies=2, rows=[2, 16], row_tokens=128, repeats=2, limit_s=1e6
    )
    found = policies.measure(options, "command")
    for row in found["rows"]:
        assert len(row["tokens_per_s"]) == 2
        assert min(row["tokens_per_s"]) > 0
    arms = {(row["arm"], row["rows"]) for row in found["rows"]}
    assert arms == {(arm, count) for arm in ("plain", "alone", "turns", "shared") for count in (2, 16)}
    assert all(each.keys() >= {"alone/plain", "turns/alone", "shared/alone"} for each in found["ratios"])
    idle = found["idle_policy"]
    assert idle["device_bytes"] == pytest.approx(idle["planned_bytes"], rel=0.01)  # and a count of steps each
    assert idle["disk_bytes"] > idle["planned_bytes"]
    assert min(found["switch"].values()) > 0
