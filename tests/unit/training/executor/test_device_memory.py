"""Which models leave a GPU's memory, and when. That they compute the same afterwards: `service/test_restarts.py`."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from support.training.small_runs import make_model

from training.errors import MemoryExceeded
from training.executor.device_memory import DeviceMemory
from training.executor.executor import Executor, ExecutorOptions
from training.executor.learner import Learner
from training.executor.operations import Spec
from training.executor.turns import Share, Turns
from training.runs.base import load_base


def executor_of(base: Any, **options: Any) -> Executor:
    return Executor(base, "demo", Path("unused"), MagicMock(), ExecutorOptions(**options), Turns(lambda _: Share()))


@pytest.mark.parametrize(("too_many", "moved"), [(0, ""), (2, "da"), (5, "daebc")])
def test_models_without_commands_go_first_and_of_the_others_the_last_one_served(
    monkeypatch: pytest.MonkeyPatch, too_many: int, moved: str
):
    executor, found = executor_of(MagicMock()), []
    monkeypatch.setattr(DeviceMemory, "is_short", lambda _: len(found) < too_many)
    monkeypatch.setattr(Executor, "_move_to_disk", lambda _, queue: found.append(queue.model))
    for model, served, waiting in (("a", 4, ()), ("b", 2, (5,)), ("c", 1, (7,)), ("d", 3, ()), ("e", 6, (9,))):
        executor.add_model(model, "acme", Spec(4, 1), waiting, 1)
        executor._queues[model].served = served
        executor._queues[model].learner = MagicMock()
    executor.add_model("chosen", "acme", Spec(4, 1), (1,), 1)
    executor.add_model("on the disk", "acme", Spec(4, 1), (1,), 1)
    executor._make_room(executor._queues["chosen"])
    assert "".join(found) == moved


def test_a_command_may_take_what_the_largest_one_took(monkeypatch: pytest.MonkeyPatch):
    cuda = SimpleNamespace(allocated=3000, most=3000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: cuda.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: cuda.most)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3500)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 6400))
    memory = DeviceMemory(torch.device("cuda"))
    assert memory.left_bytes == 1000 + 500 - 200
    for most, left in ((4200, 100), (3100, 100), (4301, -1)):
        cuda.most = most
        with memory.measuring():
            pass
        assert (memory.left_bytes, memory.is_short()) == (left, left < 0)
    assert not DeviceMemory(torch.device("cpu")).is_short()


def test_the_largest_command_is_measured_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    base = load_base(make_model(tmp_path / "model"), "float32", "cpu")
    executor, tokens, run = executor_of(base, row_tokens=256), [], Learner.run

    def noting(learner: Learner, task: Any, *arguments: Any) -> Any:
        tokens.append((task.num_tokens, task.num_answer_tokens))
        return run(learner, task, *arguments)

    monkeypatch.setattr(Learner, "run", noting)
    monkeypatch.setattr(DeviceMemory, "left_bytes", 10**9)
    with caplog.at_level(logging.INFO):
        executor.rehearse(8)
    assert tokens == [(256, 255)]
    fields: Any = caplog.records[-1].fields  # type: ignore[attr-defined]
    assert fields["models"] == 1 + 10**9 // fields["bytes"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in base.model.modules())

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Learner, "run", full)
    with pytest.raises(MemoryExceeded, match="a row of 256 tokens does not fit"):
        executor.rehearse(8)
