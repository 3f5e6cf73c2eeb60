"""What was sampled here is found in data, also after a kill; and it is bounded."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from training.service import rollouts as service_rollouts
from training.service.rollouts import Answers, Rollouts

PROMPT, ANSWER = [3, 4, 5], [6, 7]


def found(rollouts: Rollouts, *tokens: int, tenant: str = "acme") -> Answers:
    return rollouts.of(tenant)(np.array(tokens, np.int32))


def test_each_turn_of_a_conversation_is_found(tmp_path: Path):
    rollouts = Rollouts(tmp_path / "rollouts.db")
    rollouts.add("acme", PROMPT, [ANSWER, [8]])
    rollouts.add("acme", [*PROMPT, *ANSWER, 9], [[10, 11]])
    assert found(rollouts, *PROMPT, *ANSWER, 9, 10, 11) == ((2, 4), (5, 7))
    assert found(rollouts, *PROMPT, *ANSWER, 9) == ((2, 4),)
    assert found(rollouts, *PROMPT, 8) == ((2, 3),)
    assert found(rollouts, *PROMPT, 6) == ()
    assert found(rollouts, 2, *PROMPT[1:], *ANSWER) == ()
    assert found(rollouts, *PROMPT, *ANSWER, tenant="other") == ()
    assert found(rollouts) == ()


def test_the_longer_one_of_two_that_overlap_is_meant():
    rollouts = Rollouts(Path(":memory:"))
    rollouts.add("acme", PROMPT, [ANSWER, [*ANSWER, 8]])
    rollouts.add("acme", [*PROMPT, 6], [[7]])
    assert found(rollouts, *PROMPT, *ANSWER, 8) == ((2, 5),)


def test_they_survive_a_process(tmp_path: Path):
    """Nothing is closed: what is written is in the file."""
    first = Rollouts(tmp_path / "rollouts.db")
    first.add("acme", PROMPT, [ANSWER])
    assert found(Rollouts(tmp_path / "rollouts.db"), *PROMPT, *ANSWER) == ((2, 4),)
    first.close()


def test_the_oldest_of_a_tenant_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service_rollouts, "_KEPT", 32)
    rollouts = Rollouts(Path(":memory:"))
    rollouts.add("other", PROMPT, [ANSWER])
    for number in range(100):
        rollouts.add("acme", [3, number], [[5]])
        assert rollouts._counts["acme"] <= 32
    known = [number for number in range(100) if found(rollouts, 3, number, 5)]
    assert len(known) == rollouts._counts["acme"] >= 28
    assert known[-1] - known[0] == len(known) - 1  # the newest
    assert known[-1] == 99
    assert found(rollouts, *PROMPT, *ANSWER, tenant="other") == ((2, 4),)


def test_a_sample_is_told_though_the_disk_is_full(tmp_path: Path):
    rollouts = Rollouts(tmp_path / "rollouts.db")
    rollouts._database.execute("PRAGMA max_page_count = 1")
    rollouts._database.execute("PRAGMA journal_mode = DELETE")
    with pytest.raises(sqlite3.Error):
        rollouts._database.execute("CREATE TABLE more (id)")
    rollouts.add("acme", PROMPT, [[*ANSWER, number] for number in range(10_000)])
    assert found(rollouts, *PROMPT, *ANSWER, 1) == ()
