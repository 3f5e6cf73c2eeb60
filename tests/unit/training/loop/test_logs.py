"""The log goes on where the checkpoint is, and is read as trl's is."""

import io
import json
import os
from pathlib import Path

import pytest

from training.errors import CheckpointNotWritten
from training.loop import progress
from training.loop.log import JsonlLog
from training.loop.progress import Count, ProgressLog


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_from(path: Path, begin: int, *written: tuple[int, dict[str, float]]) -> None:
    log = JsonlLog(path)
    log.begin(begin)
    for step, metrics in written:
        log.write(step, metrics)
    log.close()


def test_a_resumed_log_forgets_what_comes_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    log_from(path, 0, (1, {"loss": 1 / 3}), (2, {"loss": 2 / 3}), (3, {"loss": 1.0}), (3, {"eval_loss": 0.5}))
    log_from(path, 2, (3, {"loss": 7.0}))
    assert lines(path) == [{"loss": 1 / 3, "step": 1}, {"loss": 2 / 3, "step": 2}, {"loss": 7.0, "step": 3}]


@pytest.mark.parametrize("rest", ['{"loss": 0.', '{"loss": 0.25, "step": 2}', "[1]\n", "\n", '{"loss": 1}\n'])
def test_a_line_that_a_kill_cut_off_is_removed(tmp_path: Path, rest: str):
    path = tmp_path / "log.jsonl"
    path.write_text('{"loss": 1, "step": 1}\n' + rest)
    log_from(path, 5, (2, {"loss": 2}))
    assert lines(path) == [{"loss": 1, "step": 1}, {"loss": 2, "step": 2}]


def test_a_log_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(CheckpointNotWritten, match=r"none/log.jsonl cannot be written \(No such file"):
        JsonlLog(tmp_path / "none" / "log.jsonl").begin(0)
    log = JsonlLog(Path("/dev/full"))
    file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)
    log._file = file  # not by `begin`, because /dev/full cannot be truncated
    with pytest.raises(CheckpointNotWritten, match="No space left"):
        log.write(1, {"loss": 1.0})
    log.close()  # raises nothing, which would replace the error above
    assert file.closed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    for stream, expected in ((io.StringIO(), "step 20/40  loss 0.3333\n"), (Terminal(), "20/40")):
        log = ProgressLog(40, stream)
        log.begin(10)
        log.write(20, {"loss": 1 / 3, "epoch": 0.5})
        log.close()
        assert expected in stream.getvalue()
        assert "loss" in stream.getvalue()


def test_a_count_is_a_bar_on_a_terminal_and_now_and_then_a_line_elsewhere(monkeypatch: pytest.MonkeyPatch):
    terminal, file = Terminal(), io.StringIO()
    now = iter((0.0, 0.0, 19.0, 20.0, 20.0, 39.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    for stream in (terminal, file):
        count = Count("run/best, all", 3, "prompt", stream)
        for _ in range(3):
            count.add()
        count.close()
    assert "run/best, all" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert file.getvalue() == "run/best, all: 2 of 3 prompts\n"
