"""One run's folder: what it trains, its log, and its two checkpoints.

run.json         what the run was started with; --resume demands the same
log.jsonl        one line per log, named as trl's
last/, best/     adapters as `prelude adapters import` takes them; `last/training/` has what resuming needs

The log is on the disk before the checkpoint that counts its lines, and last/ before a best/ of the same step: whatever
a kill leaves is at most what last/ says, and best/ can be written again from it.
"""

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from adapters.files.durable import fsync, make_folder
from training.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten, OptionInvalid
from training.loop.state import TrainingState
from training.loop.whole_folder import replace_folder, settle

LAST, BEST = "last", "best"
DATE = "date"  # in run.json: what chat templates took for the present time, if they ask for it
_STATE = "training"
_RUN, _LOG, _LOCK, _EVALUATION = "run.json", "log.jsonl", ".lock", "evaluation.json"

SaveAdapter = Callable[[Path], None]  # writes the adapter's files into a folder


def begun_at(path: Path) -> datetime | None:
    """The date in the folder's run.json, if it has one that can be read."""
    try:
        return datetime.fromisoformat(json.loads((path / _RUN).read_text())[DATE])
    except (OSError, ValueError, LookupError, TypeError):
        return None


class RunFolder:
    """The folder of a run, which one process at a time may use."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Create or open it. `identity` is what may not change while the run goes on: JSON, by the options' names.

        Raises OptionInvalid if there is a run and `resume` is False, another process trains in it, or files of
        these names are no run's, and CheckpointMismatch if it is another run.
        """
        self.path = path
        try:
            make_folder(path)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointNotWritten(
                f"{path} cannot be written to ({error.strerror}); name another folder"
            ) from error
        try:
            self._begin(json.loads(json.dumps(identity)), resume)
        except BaseException:
            self.close()
            raise

    @property
    def log_path(self) -> Path:
        return self.path / _LOG

    @property
    def last(self) -> Path:
        """The adapter of the newest checkpoint, if there is one."""
        return self.path / LAST

    @property
    def best(self) -> Path:
        """The adapter with the lowest evaluation loss, if there was an evaluation."""
        return self.path / BEST

    def state(self) -> TrainingState:
        """Where to continue: after the last checkpoint, or at step 0. Raises CheckpointDamaged."""
        return TrainingState.read(self.last / _STATE) if self.last.exists() else TrainingState(0)

    def lacks_best(self, state: TrainingState) -> bool:
        """Whether best/ has yet to be written from this state, because a kill came between last/ and best/.

        Raises CheckpointDamaged if best/ is not what the state says and cannot be written from it.
        """
        expected = None if state.best_step is None else (state.best_step, state.best_loss)
        found = self._best_evaluation()
        if found == expected:
            return False
        if expected is not None and state.best_step == state.step:
            return True
        has, wants = (f"that of step {each[0]}" if each else "none" for each in (found, expected))
        raise CheckpointDamaged(
            f"{self.path}: {BEST}/ has {has}, and by {LAST}/, of step {state.step}, the best checkpoint is {wants}; "
            "put back the folders that belong together, or begin again in another folder"
        )

    def _best_evaluation(self) -> tuple[int, float] | None:
        """Step and loss."""
        if not self.best.exists():
            return None
        path = self.best / _STATE / _EVALUATION
        try:
            numbers = json.loads(path.read_text())
            return numbers["step"], numbers["eval_loss"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointDamaged(
                f"{path} cannot be read ({type(error).__name__}: {error}); restore {BEST}/, or begin again in another "
                "folder"
            ) from error

    def save_last(self, state: TrainingState, save_adapter: SaveAdapter) -> None:
        """Replace the last checkpoint. Raises CheckpointNotWritten; then the one before is as it was."""

        def write(folder: Path) -> None:
            save_adapter(folder)
            (folder / _STATE).mkdir()
            state.write(folder / _STATE)
            # A resumed run writes no line up to this step again.
            if self.log_path.exists():
                fsync(self.log_path)

        self._replace(self.last, state.step, write)

    def save_best(self, step: int, loss: float, save_adapter: SaveAdapter) -> None:
        """Replace the best checkpoint. Raises CheckpointNotWritten; then the one before is as it was."""

        def write(folder: Path) -> None:
            save_adapter(folder)
            (folder / _STATE).mkdir()
            (folder / _STATE / _EVALUATION).write_text(json.dumps({"step": step, "eval_loss": loss}))

        self._replace(self.best, step, write)

    def close(self) -> None:
        """Let another process use the folder."""
        os.close(self._lock)

    def _begin(self, identity: dict[str, Any], resume: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionInvalid(f"another process trains in {self.path}; stop it, or name another folder") from None
        run = self.path / _RUN
        if run.exists():
            if not resume:
                raise OptionInvalid(f"{self.path} has a run; --resume continues it, another folder begins a new one")
            self._check_same(run, identity)
        else:
            if files := [each.name for each in (self.last, self.best, self.log_path) if each.exists()]:
                raise OptionInvalid(
                    f"{self.path} has {' and '.join(files)}, but no {_RUN}: a run would continue or replace what is "
                    "not its own. Put it back, or name another folder"
                )
            partial = run.with_suffix(".partial")
            try:
                partial.write_text(json.dumps(identity, indent=1))
                fsync(partial)
                partial.rename(run)
                fsync(self.path)
            except OSError as error:
                raise CheckpointNotWritten(f"{run} cannot be written ({error.strerror}); free disk space") from error
        for target in (self.last, self.best):
            try:
                settle(target)
            except OSError as error:
                raise CheckpointNotWritten(
                    f"{target} cannot be replaced by the checkpoint beside it ({error.strerror or error}); the folder "
                    "must be writable"
                ) from error

    def _check_same(self, run: Path, identity: Mapping[str, Any]) -> None:
        try:
            earlier, present = _flat(json.loads(run.read_text())), _flat(identity)
            both = {name: (earlier.get(name), present.get(name)) for name in (*earlier, *present)}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{run} cannot be read ({error}); begin again in another folder") from error
        for name, (before, now) in both.items():
            if before != now:
                raise CheckpointMismatch(
                    f"{self.path}: {name.replace('_', ' ')} was {before!r:.80} and is {now!r:.80} now; a run is "
                    "resumed with what it was started with. For anything else name another folder"
                )

    def _replace(self, target: Path, step: int, write: Callable[[Path], None]) -> None:
        try:
            replace_folder(target, write)
        except OSError as error:
            kept = f"the {target.name} checkpoint before it is whole" if target.exists() else "there is none before it"
            raise CheckpointNotWritten(
                f"the checkpoint of step {step} cannot be written to {target} ({error.strerror or error}); {kept}. "
                "Make room and continue with --resume"
            ) from error


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"adapter": {"rank": 4}} as {"adapter rank": 4}, so that a message can name what differs."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = {f"{name} {key}": each for key, each in _flat(value).items()} if isinstance(value, dict) else {}
        flat |= inner or {name: value}
    return flat
