"""A run's folder: who may use it, what it keeps, what it refuses."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters.full_disk import files_of_at_most

from training.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten, OptionInvalid
from training.loop.run_folder import RunFolder
from training.loop.state import TrainingState

ADAPTER = {"kind": "lora", "rank": 4, "alpha": 32.0, "positions": "prefill", "modules": None, "layers": None}
IDENTITY: dict[str, Any] = {
    "base_model": {"weights": "f00d"},
    "data": "1234",
    "learning_rate": 0.1,
    "adapter": ADAPTER,
}


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
    tensors = {"parameter/a": torch.full((3, 2), 1 / 3), "step/a": torch.tensor(2.0)}
    return TrainingState(step, tensors, 77, 1 / 7, 2, {"loss": (1 / 3, 5.0)})


def test_a_state_comes_back_bit_by_bit(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        assert folder.state() == TrainingState(0)
        saved = state(4)
        folder.save_last(saved, adapter())
    with opened(tmp_path / "run") as folder:
        found = folder.state()
        assert (found.step, found.num_tokens, found.best_loss, found.best_step) == (4, 77, 1 / 7, 2)
        assert found.window == saved.window
        assert found.tensors.keys() == saved.tensors.keys()
        assert all(torch.equal(found.tensors[name], saved.tensors[name]) for name in saved.tensors)
        assert (folder.last / "adapter_config.json").read_text() == "adapter"


def evaluated(step: int, best_step: int | None, best_loss: float | None) -> TrainingState:
    return replace(state(step), best_step=best_step, best_loss=best_loss)


def test_a_best_checkpoint_that_a_kill_left_out_is_asked_for(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        assert not folder.lacks_best(evaluated(4, None, None))
        assert folder.lacks_best(evaluated(4, 4, 0.5))
        folder.save_best(4, 0.5, adapter())
        assert not folder.lacks_best(evaluated(4, 4, 0.5))
        assert not folder.lacks_best(evaluated(6, 4, 0.5))
        assert folder.lacks_best(evaluated(8, 8, 0.4))


@pytest.mark.parametrize(
    ("kept", "said", "message"),
    [
        (
            (8, 0.4),
            (4, 0.5),
            "best/ has that of step 8, and by last/, of step 6, the best checkpoint is that of step 4",
        ),
        ((8, 0.4), (None, None), "best/ has that of step 8, and by last/, of step 6, the best checkpoint is none"),
        (None, (4, 0.5), "best/ has none, and by last/, of step 6, the best checkpoint is that of step 4"),
    ],
)
def test_a_best_checkpoint_of_another_run_is_refused(tmp_path: Path, kept, said, message: str):
    with opened(tmp_path / "run") as folder:
        if kept is not None:
            folder.save_best(*kept, adapter())
        with pytest.raises(CheckpointDamaged, match=message):
            folder.lacks_best(evaluated(6, *said))


def test_a_run_without_its_last_checkpoint_does_not_begin_anew(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        folder.save_best(4, 0.5, adapter())
        with pytest.raises(CheckpointDamaged, match="of step 0, the best checkpoint is none"):
            folder.lacks_best(folder.state())


def test_a_best_checkpoint_that_is_half_deleted(tmp_path: Path):
    with opened(tmp_path / "run") as folder:
        folder.save_best(4, 0.5, adapter())
        shutil.rmtree(folder.best / "training")
        with pytest.raises(CheckpointDamaged, match=r"best/training/evaluation.json cannot be read"):
            folder.lacks_best(evaluated(6, 4, 0.5))


@pytest.mark.parametrize("name", ["last", "best", "log.jsonl"])
def test_a_folder_whose_files_are_no_runs_is_left_alone(tmp_path: Path, name: str):
    """Its log would be cut off at step 0, or its checkpoint be continued by a run that has other options."""
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.write_text("mine") if name == "log.jsonl" else path.mkdir()
    for resume in (True, False):
        with pytest.raises(OptionInvalid, match=f"has {name}, but no run.json"), opened(path.parent, resume=resume):
            pass
    assert {each.name for each in path.parent.iterdir()} == {".lock", name}


def test_what_a_rename_makes_count_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine that fails may keep a rename and lose what was written before it."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        events.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    with opened(tmp_path / "run") as folder:
        folder.log_path.write_text('{"step": 4}\n')
        folder.save_last(state(4), adapter())
    for content, name in (
        ("run.partial", "run.json"),
        ("log.jsonl", ".last.new"),
        ("adapter_config.json", ".last.new"),
        ("state.safetensors", ".last.new"),
        (".last.partial", ".last.new"),
    ):
        assert events.index(f"flush {content}") < events.index(f"rename to {name}"), events


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
        ({"base_model": {"weights": "beef"}}, "base model weights was 'f00d' and is 'beef' now"),
        # The last of many fields, which the start of the whole would not show.
        ({"adapter": ADAPTER | {"layers": [0]}}, r"adapter layers was None and is \[0\] now"),
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


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "bytes": lambda tensors, _: tensors.write_bytes(tensors.read_bytes()[:-1] + b"?"),
    "length": lambda tensors, _: tensors.write_bytes(tensors.read_bytes()[:-10]),
    "missing": lambda tensors, _: tensors.unlink(),
    "numbers": lambda _, numbers: numbers.write_text("{"),
    "format": lambda _, numbers: numbers.write_text('{"format": "other"}'),
    "type": lambda _, numbers: numbers.write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: str):
    with opened(tmp_path / "run") as folder:
        folder.save_last(state(4), adapter())
        DAMAGES[damage](*(folder.last / "training" / name for name in ("state.safetensors", "state.json")))
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
        with files_of_at_most(100), pytest.raises(CheckpointNotWritten) as raised:
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
