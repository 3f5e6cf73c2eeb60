"""A run's folder: who may use it, what it keeps, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters.full_disk import files_of_at_most

from training.checkpoints.run_folder import RunFolder
from training.checkpoints.state import TrainingState, random_state, restore_random_state
from training.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten, OptionInvalid

IDENTITY: dict[str, Any] = {"base_model": {"weights": "f00d"}, "data": "1234", "learning_rate": 0.1}


def adapter(text: str = "adapter"):
    return lambda folder: (folder / "adapter_config.json").write_text(text)


@contextmanager
def opened(path: Path, *, resume: bool = True, **changed: Any) -> Iterator[RunFolder]:
    folder = RunFolder(path, IDENTITY | changed, resume=resume)
    try:
        yield folder
    finally:
        folder.close()


def state(step: int) -> TrainingState:
    tensors = {"parameter/a": torch.full((3, 2), 1 / 3), "step/a": torch.tensor(2.0), **random_state()}
    return TrainingState(step, tensors, 77, 1 / 7, 2, {"loss": (1 / 3, 5.0)})


def test_a_state_comes_back_bit_by_bit(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        assert folder.state() == TrainingState(0)
        saved = state(4)
        folder.save_last(saved, adapter())
    torch.rand(5)
    with opened(tmp_path / "run") as folder:
        found = folder.state()
        assert (found.step, found.num_tokens, found.best_loss, found.best_step) == (4, 77, 1 / 7, 2)
        assert found.window == saved.window
        assert found.tensors.keys() == saved.tensors.keys()
        assert all(torch.equal(found.tensors[name], saved.tensors[name]) for name in saved.tensors)
        assert (folder.last / "adapter_config.json").read_text() == "adapter"


def test_random_numbers_go_on_where_they_were():
    kept = random_state()
    expected = torch.rand(4)
    torch.rand(9)
    restore_random_state(kept)
    assert torch.equal(torch.rand(4), expected)


def test_best_has_the_adapter_and_what_it_was_chosen_by(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        folder.save_best(3, 0.5, adapter("first"))
        folder.save_best(5, 0.4, adapter("second"))
        assert (folder.best / "adapter_config.json").read_text() == "second"
        assert json.loads((folder.best / "training" / "evaluation.json").read_text()) == {"step": 5, "eval_loss": 0.4}


def test_a_run_is_not_begun_over(tmp_path: Path):
    with opened(tmp_path / "run", resume=False):
        pass
    with (
        pytest.raises(OptionInvalid, match=r"run has a run; --resume continues it"),
        opened(tmp_path / "run", resume=False),
    ):
        pass


def test_two_processes_do_not_share_a_folder(tmp_path: Path):
    wanted = pytest.raises(OptionInvalid, match="another process trains in")
    with opened(tmp_path / "run"), wanted, opened(tmp_path / "run"):
        pass
    with opened(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_model": {"weights": "beef"}}, r"base model was {'weights': 'f00d'} and is {'weights': 'beef'} now"),
        ({"data": "99"}, "data was '1234' and is '99' now"),
        ({"learning_rate": 0.2}, "learning rate was 0.1 and is 0.2 now"),
        ({"beta": 1}, "beta was None and is 1 now"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changed: dict[str, Any], message: str):
    with opened(tmp_path / "run") as folder:
        folder.save_last(state(4), adapter())
    with pytest.raises(CheckpointMismatch, match=message), opened(tmp_path / "run", **changed):
        pass
    with opened(tmp_path / "run") as folder:  # the refused one has left the folder alone
        assert folder.state().step == 4


@pytest.mark.parametrize("damage", ["bytes", "length", "numbers", "missing", "format", "type"])
def test_damage_is_found(tmp_path: Path, damage: str):
    with opened(tmp_path / "run") as folder:
        folder.save_last(state(4), adapter())
        tensors, numbers = (folder.last / "training" / name for name in ("state.safetensors", "state.json"))
        content = bytearray(tensors.read_bytes())
        match damage:
            case "bytes":
                content[-1] ^= 1
                tensors.write_bytes(content)
            case "length":
                tensors.write_bytes(content[:-10])
            case "numbers":
                numbers.write_text("{")
            case "missing":
                tensors.unlink()
            case "format":
                numbers.write_text(json.dumps({"format": "other"}))
            case "type":
                numbers.write_text("[]")
        with pytest.raises(CheckpointDamaged, match="state"):
            folder.state()


def test_a_run_json_that_is_damaged(tmp_path: Path):
    with opened(tmp_path / "run"):
        pass
    (tmp_path / "run" / "run.json").write_text("[1]")
    with pytest.raises(CheckpointDamaged, match=r"run.json cannot be read"), opened(tmp_path / "run"):
        pass


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        folder.save_last(state(4), adapter())
        with files_of_at_most(1000), pytest.raises(CheckpointNotWritten) as raised:
            folder.save_last(state(8), adapter("new"))
        assert "the checkpoint of step 8 cannot be written" in str(raised.value)
        assert "(File too large); the last checkpoint before it is whole" in str(raised.value)
        assert "--resume" in str(raised.value)
        assert folder.state().step == 4
        assert (folder.last / "adapter_config.json").read_text() == "adapter"
        assert {each.name for each in folder.path.iterdir()} == {".lock", "run.json", "last"}
        folder.save_last(state(8), adapter("new"))
        assert folder.state().step == 8


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"file/run cannot be written to"), opened(tmp_path / "file" / "run"):
        pass
