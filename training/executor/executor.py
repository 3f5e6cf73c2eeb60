"""The thread that computes commands: each model's in the order of their numbers, models of all tenants in turns.

After a start, a model is restored from its snapshot, and the commands after it are computed again. Those that have an
outcome keep it; they are computed for the parameters that follow from them.
"""

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from training.adapted_model import AdaptedModel
from training.errors import CheckpointDamaged, LossNotFinite, MemoryExceeded, TrainingError
from training.executor.device_memory import DeviceMemory
from training.executor.learner import Learner
from training.executor.operations import (
    Datum,
    Done,
    Export,
    Failure,
    Load,
    Operation,
    Outcome,
    Pass,
    Save,
    Spec,
    Step,
)
from training.executor.turns import Turns
from training.runs.base import LoadedBase
from training.trainable.packed import ServedWeights

STATES = ("ready", "paused", "missing", "idle", "broken")  # of models, see `Executor.states`

log = logging.getLogger(__name__)


class Command(NamedTuple):
    """A command in the log."""

    operation: Operation | None  # None: it was refused, or a snapshot has what it did
    outcome: Outcome | None  # None: not told yet
    is_of_gradient: bool  # a pass with a gradient
    num_bytes: int


class CommandLog(Protocol):
    """What the executor reads and writes. Called from its thread."""

    def command(self, model: str, seq: int) -> Command: ...

    def finish(self, model: str, seq: int, outcome: Outcome) -> None: ...

    def exported(self, model: str, seq: int, operation: Export, weights: ServedWeights) -> None:
        """Whoever publishes the weights finishes the command, and then calls `Executor.published`."""

    def forget(self, model: str, seq: int) -> None:
        """A snapshot has what the commands up to this one did: after a start, those after it are computed."""


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    row_tokens: int = 2048  # of a sequence with its answers, and of a row
    snapshot_s: float = 60.0  # of computing after the last snapshot
    snapshot_bytes: int = 64 * 1024**2  # of commands


@dataclass(slots=True, eq=False)
class _Queue:
    """The commands of one model."""

    model: str
    tenant: str
    spec: Spec
    next: int
    waiting: set[int]
    served: int = 0  # when it was last
    learner: Learner | None = None
    restored: int = -1  # the last command of the snapshot that the learner began with
    is_exporting: bool = False  # weights are on their way: no snapshot yet, since a start makes them again
    is_held: bool = False  # until they have arrived
    broken: str | None = None  # why nothing can be computed any more
    is_removed: bool = False
    computed_s: float = 0.0  # since the last snapshot
    num_bytes: int = 0


class Executor:
    """Methods may be called from any thread."""

    def __init__(
        self,
        base: LoadedBase,
        base_name: str,
        folder: Path,
        commands: CommandLog,
        options: ExecutorOptions,
        turns: Turns,
    ) -> None:
        self._base, self._base_name, self._folder, self._log = base, base_name, folder, commands
        self._options, self._turns = options, turns
        self._queues: dict[str, _Queue] = {}
        self._turn = 0
        self._is_stopping = False
        self._changed = threading.Condition()
        self._attached: tuple[Learner, AdaptedModel] | None = None
        self._memory = DeviceMemory(base.model.device)
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def rehearse(self, rank: int) -> None:
        """Measure what commands take: a full row of answers, and a step, with LoRA of this rank. Before `start`.

        Raises MemoryExceeded if they do not fit.
        """
        tokens, weights = (np.ones(self._options.row_tokens, dtype).tobytes() for dtype in (np.int32, np.float32))
        datum = Datum(tokens, tokens, ((0, self._options.row_tokens - 1),), {"weights": weights})
        try:
            with self._memory.measuring(), suppress(LossNotFinite):
                learner = Learner(Spec(rank, 0), self._base.sizes, self._base.model.device)
                learner.run(Pass("cross_entropy", {}, (datum,)), self._model(learner), self._options.row_tokens)
                learner.step(Step(0.0, 0.9, 0.95, 1e-8, 0.0, 0.0))
        except torch.OutOfMemoryError as error:
            raise MemoryExceeded(
                f"a row of {self._options.row_tokens} tokens does not fit into the device's memory beside the model; "
                "lower --row-tokens, or stop what else uses it"
            ) from error
        finally:
            self._detach()
        fields = {"rank": rank, "bytes": learner.num_bytes, "models": 1 + self._memory.left_bytes // learner.num_bytes}
        log.info("models that fit into the device's memory; the others are on the disk", extra={"fields": fields})

    def stop(self) -> None:
        """Return after the present command."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join()

    def add_model(self, model: str, tenant: str, spec: Spec, seqs: Collection[int], next_seq: int) -> None:
        """`seqs`: numbers of its commands in the log; the first to compute is `next_seq`."""
        with self._changed:
            self._queues[model] = _Queue(model, tenant, spec, next_seq, {seq for seq in seqs if seq >= next_seq})
            self._changed.notify_all()

    def add(self, model: str, seq: int) -> None:
        """The log has another command."""
        with self._changed:
            if (queue := self._queues.get(model)) is not None and seq >= queue.next:
                queue.waiting.add(seq)
                self._changed.notify_all()

    def published(self, model: str) -> None:
        """What was exported has arrived, or never will, and the log has the outcome."""
        with self._changed:
            if (queue := self._queues.get(model)) is not None:
                queue.is_exporting = queue.is_held = False
                self._changed.notify_all()

    def remove_model(self, model: str) -> None:
        """Forget it after the present command, and delete its snapshot."""
        with self._changed:
            if (queue := self._queues.get(model)) is not None:
                queue.is_removed = True
                self._changed.notify_all()

    @property
    def tenants(self) -> dict[str, str]:
        """By model, also of those that are removed after the present command."""
        with self._changed:
            return {each.model: each.tenant for each in self._queues.values()}

    def next_of(self, model: str) -> int:
        """The number of the command that is to be computed next, or is being computed."""
        with self._changed:
            return self._queues[model].next if model in self._queues else 0

    def is_idle(self, model: str) -> bool:
        with self._changed:
            return model not in self._queues or not self._queues[model].waiting

    def gaps(self) -> dict[str, tuple[int, int]]:
        """By model: the number that is missed, and the first one after it that waits."""
        with self._changed:
            return {
                queue.model: (queue.next, min(queue.waiting))
                for queue in self._queues.values()
                if queue.waiting and queue.next not in queue.waiting
            }

    def states(self) -> Counter[str]:
        """How many models are in each of STATES.

        Those with commands are ready, paused by their tenant's limit, or wait for a command that is missing.
        """
        with self._changed:
            return Counter(map(self._state_of, self._queues.values()))

    def state_of(self, model: str) -> str:
        with self._changed:
            return self._state_of(self._queues[model]) if model in self._queues else "idle"

    def _state_of(self, queue: _Queue) -> str:
        if queue.broken is not None:
            return "broken"
        if not queue.waiting:
            return "idle"
        if queue.next not in queue.waiting:
            return "missing"
        return "paused" if self._turns.wait_s(queue.tenant) else "ready"

    @property
    def num_bytes(self) -> int:
        """Of the parameters and moments of models that are not on the disk."""
        with self._changed:
            learners = [each.learner for each in self._queues.values()]
        return sum(each.num_bytes for each in learners if each is not None)

    def snapshot_of(self, model: str) -> Path:
        return self._folder / "snapshots" / folder_of(model)

    @property
    def is_alive(self) -> bool:
        """False after an error of the log, without which nothing can be computed."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (queue := self._chosen()) is not None:
                (self._remove if queue.is_removed else self._compute)(queue)
        except Exception:  # of the log: what was not told is computed again after a start
            log.exception("the executor has ended")
        finally:
            self._detach()

    def _detach(self) -> None:
        """Leave the base model as it was."""
        if self._attached is not None:
            self._attached[1].detach()
            self._attached = None

    def _chosen(self) -> _Queue | None:
        """The queue whose turn it is, or that is to be removed; None: stop."""
        with self._changed:
            while not self._is_stopping:
                if removed := next((each for each in self._queues.values() if each.is_removed), None):
                    return removed
                ready = [each for each in self._queues.values() if each.next in each.waiting and not each.is_held]
                tenants = dict.fromkeys(each.tenant for each in sorted(ready, key=lambda each: each.served))
                if (tenant := self._turns.first(tenants)) is not None:
                    chosen = min((each for each in ready if each.tenant == tenant), key=lambda each: each.served)
                    self._turn += 1
                    chosen.served = self._turn
                    return chosen
                self._changed.wait(min(map(self._turns.wait_s, tenants), default=None))
        return None

    def wait_s(self, tenant: str) -> float:
        """Until the tenant is within its limit of tokens."""
        with self._changed:
            return self._turns.wait_s(tenant)

    def _remove(self, queue: _Queue) -> None:
        shutil.rmtree(self.snapshot_of(queue.model), ignore_errors=True)  # which takes long
        if self._attached is not None and self._attached[0] is queue.learner:
            self._detach()
        queue.learner = None  # `_run` has the queue until there is another
        with self._changed:
            del self._queues[queue.model]

    def _compute(self, queue: _Queue) -> None:
        self._make_room(queue)
        seq, began_at = queue.next, time.monotonic()
        command = self._log.command(queue.model, seq)
        new = None if command.outcome is not None else command.operation  # before a restart, others were counted
        with self._changed:
            if queue.is_exporting and isinstance(command.operation, Export | Load):  # one at a time are in memory
                queue.is_held = True
                return
            self._turns.take(queue.tenant, new.num_tokens if isinstance(new, Pass) else 0)
        with self._memory.measuring():
            outcome = self._outcome(queue, seq, command)
        if isinstance(outcome, Failure) and seq > queue.restored:  # a snapshot is as of after it
            self._note_failure(queue, seq, command, outcome)
        if command.outcome is None and outcome is not None:
            self._log.finish(queue.model, seq, outcome)
        queue.num_bytes += command.num_bytes
        queue.computed_s += time.monotonic() - began_at
        with self._changed:
            queue.waiting.discard(seq)
            queue.next = seq + 1  # from now on a retry is known by its number, also when it is forgotten
        if isinstance(outcome, Done) and seq > queue.restored and queue.broken is None:
            self._forget_if_due(queue, seq, command.operation)

    def _outcome(self, queue: _Queue, seq: int, command: Command) -> Outcome | None:
        """What a command comes to; None: somebody else will say so."""
        if queue.broken is not None:
            return command.outcome or Failure(queue.broken, is_users=False)
        try:
            return self._result(queue, seq, command)
        except TrainingError as error:
            return Failure(str(error), is_users=not isinstance(error, CheckpointDamaged))
        except OSError as error:
            return Failure(f"nothing was saved: {error.strerror or type(error).__name__}", is_users=False)
        except torch.OutOfMemoryError:
            return Failure("the device's memory is full; send shorter sequences", is_users=False)
        except Exception:
            log.exception("a command failed", extra={"fields": {"model": queue.model, "seq": seq}})
            return Failure("the trainer could not compute this command; its log has the reason", is_users=False)

    def _note_failure(self, queue: _Queue, seq: int, command: Command, failure: Failure) -> None:
        """Now or before a restart: what follows must not step on a part of a gradient, or on other parameters."""
        if queue.learner is None or seq == 0 or isinstance(command.outcome, Done):
            why = f"the model cannot be continued from command {seq} ({failure.message}); create one from a checkpoint"
            queue.broken = queue.broken or why
        elif command.is_of_gradient:
            queue.learner.lose(f"command {seq}")
        elif isinstance(command.operation, Step):
            queue.learner.drop()

    def _result(self, queue: _Queue, seq: int, command: Command) -> Outcome | None:
        learner, operation, is_new = self._learner(queue), command.operation, command.outcome is None
        if isinstance(operation, Export) and is_new:
            weights, queue.is_exporting = learner.export(self._base.model.dtype), True
            self._log.exported(queue.model, seq, operation, weights)
            return None
        if seq <= queue.restored:  # the process ended between its snapshot and its outcome
            return command.outcome or Done()
        if isinstance(command.outcome, Failure):  # also then, or refused
            return command.outcome
        match operation:
            case Load(folder=folder, whole=whole):
                loaded = Learner(queue.spec, self._base.sizes, self._base.model.device)
                loaded.load(self._folder / folder, whole=whole)
                loaded.save(self.snapshot_of(queue.model), seq, self._base_name)  # the checkpoint may be replaced
                queue.learner = loaded
            case Pass() as task if is_new or not task.forward_only:
                return learner.run(task, self._model(learner), self._options.row_tokens)
            case Step() as task:
                return learner.step(task)
            case Save(folder=folder) if is_new:
                learner.save(self._folder / folder, seq, self._base_name)
        return Done()

    def _learner(self, queue: _Queue) -> Learner:
        """As of the last snapshot, when it is asked for first. Raises TrainingError."""
        if queue.learner is None:
            learner = Learner(queue.spec, self._base.sizes, self._base.model.device)
            snapshot = self.snapshot_of(queue.model)
            if snapshot.exists() or queue.next > 0:  # the log has let go of what a snapshot has
                queue.restored = learner.load(snapshot, whole=True)
            queue.learner = learner
        return queue.learner

    def _make_room(self, chosen: _Queue) -> None:
        """Move other models to the disk while a command may not fit beside them.

        Those without commands go first; of the others, the one that was served last is needed last.
        """
        with self._changed:
            others = [each for each in self._queues.values() if each is not chosen and each.learner is not None]
            others.sort(key=lambda each: (bool(each.waiting), -each.served if each.waiting else each.served))
        for each in others:
            if not self._memory.is_short():
                return
            self._move_to_disk(each)

    def _move_to_disk(self, queue: _Queue) -> None:
        """Its next command restores it, in the midst of a step, too. It stays if it cannot be saved now."""
        assert queue.learner is not None
        is_saved = queue.broken is not None or queue.next - 1 <= queue.restored
        if not is_saved and (queue.learner.lost or not self._save_snapshot(queue, queue.next - 1)):
            return
        if self._attached is not None and self._attached[0] is queue.learner:
            self._detach()
        queue.learner = None

    def _model(self, learner: Learner) -> AdaptedModel:
        """The base model with this adapter."""
        if self._attached is None or self._attached[0] is not learner:
            self._detach()
            self._attached = (learner, AdaptedModel(self._base.model, learner.adapter))
        return self._attached[1]

    def _forget_if_due(self, queue: _Queue, seq: int, operation: Operation | None) -> None:
        """After a load, and after a step if there is much since the last snapshot: then no gradient has been summed."""
        is_due = queue.computed_s >= self._options.snapshot_s or queue.num_bytes >= self._options.snapshot_bytes
        if isinstance(operation, Load):
            self._forget(queue, seq)
        elif isinstance(operation, Step) and is_due:
            self._save_snapshot(queue, seq)

    def _save_snapshot(self, queue: _Queue, seq: int) -> bool:
        """As of the command `seq`, the last one; False if that cannot be now."""
        assert queue.learner is not None
        if queue.is_exporting:
            return False
        try:
            queue.learner.save(self.snapshot_of(queue.model), seq, self._base_name, with_gradient=True)
        except OSError as error:  # the log has what it would save
            log.warning("no snapshot", extra={"fields": {"model": queue.model, "error": str(error)}})
            return False
        self._forget(queue, seq)
        return True

    def _forget(self, queue: _Queue, seq: int) -> None:
        """A snapshot is as of the command `seq`."""
        self._log.forget(queue.model, seq)
        queue.computed_s, queue.num_bytes = 0.0, 0


def folder_of(model: str) -> str:
    """A folder's name for a model's id, which has colons."""
    return model.replace(":", "-")
