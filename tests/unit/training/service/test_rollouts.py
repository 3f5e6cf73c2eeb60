"""What was sampled here is found in data, also after a kill; and it is bounded."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from training.service.data import rollouts as service_rollouts
from training.service.data.rollouts import Answers, Rollouts

PROMPT, ANSWER = [3, 4, 5], [6, 7]


def found(rollouts: Rollouts, *tokens: int, tenant: str = "acme") -> Answers:
    return rollouts.find(tenant, np.array(tokens, np.int32))


def test_each_turn_of_a_conversation_is_found(tmp_path: Path):
    written = Rollouts(tmp_path / "rollouts.db")
    written.add("acme", PROMPT, [ANSWER, [8]])
    written.add("acme", [*PROMPT, *ANSWER, 9], [[10, 11]])
    written.add("other", PROMPT, [[5, 5]])
    for rollouts in (written, Rollouts(tmp_path / "rollouts.db")):  # which nobody has closed, as after a kill
        assert found(rollouts, *PROMPT, *ANSWER, 9, 10, 11) == ((2, 4), (5, 7))
        assert found(rollouts, *PROMPT, *ANSWER, 9) == ((2, 4),)
        assert found(rollouts, *PROMPT, 8) == ((2, 3),)
        for unknown in ([*PROMPT, 6], [2, *PROMPT[1:], *ANSWER], []):
            assert found(rollouts, *unknown) == ()
        assert found(rollouts, *PROMPT, *ANSWER, tenant="other") == ()


def test_the_oldest_of_a_tenant_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service_rollouts, "_KEPT", 32)
    rollouts = Rollouts(Path(":memory:"))
    rollouts.add("other", PROMPT, [ANSWER])
    for number in range(100):
        rollouts.add("acme", [3, number], [[5]])
    known = [number for number in range(100) if found(rollouts, 3, number, 5)]
    assert 28 <= len(known) <= 32
    assert known == list(range(100 - len(known), 100))
    assert found(rollouts, *PROMPT, *ANSWER, tenant="other") == ((2, 4),)


def test_a_full_disk_keeps_nobody_from_sampling(tmp_path: Path):
    rollouts = Rollouts(tmp_path / "rollouts.db")
    rollouts._database.execute("PRAGMA max_page_count = 1")
    rollouts.add("acme", PROMPT, [[*ANSWER, number] for number in range(10_000)])
    assert found(rollouts, *PROMPT, *ANSWER, 1) == ()


@pytest.mark.parametrize("damage", ["no database", "a page", "cut off"])
def test_a_damaged_file_keeps_nobody_from_training(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "rollouts.db"
    written = Rollouts(path)
    written.add("acme", PROMPT, [[*ANSWER, number] for number in range(1000)])
    written.close()
    content = bytearray(path.read_bytes())
    if damage == "no database":
        content = bytearray(b"no database" * 1000)
    elif damage == "a page":  # one of those that have samples
        content[2 * 4096 : 3 * 4096] = b"\xff" * 4096
    else:
        del content[3 * 4096 :]
    path.write_bytes(content)
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).write_bytes(b"\xff" * 40_000)
    rollouts = Rollouts(path)
    assert "samples of before are not known" in caplog.text
    assert found(rollouts, *PROMPT, *ANSWER, 1) == ()
    rollouts.add("acme", PROMPT, [ANSWER])
    rollouts.close()
    assert found(Rollouts(path), *PROMPT, *ANSWER) == ((2, 4),)


def test_a_file_that_cannot_be_opened_is_kept(tmp_path: Path):
    (tmp_path / "rollouts.db").mkdir()
    with pytest.raises(sqlite3.OperationalError):
        Rollouts(tmp_path / "rollouts.db")
    assert (tmp_path / "rollouts.db").is_dir()
