"""The loop: steps, and after some of them a line of the log, an evaluation, a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from training.adapted_model import AdaptedModel
from training.errors import LossNotFinite, MemoryExceeded
from training.loop.averages import Averages
from training.loop.batches import Batches
from training.loop.data_order import DataOrder
from training.loop.log import Log
from training.loop.optimiser import Optimiser
from training.loop.options import LoopOptions
from training.loop.run_folder import RunFolder
from training.loop.schedule import Schedule
from training.loop.state import TrainingState
from training.losses import Loss, Objective, Scorer
from training.trainable.files import write_adapter
from training.tree.rows import NONE, Row

_EVALUATED_AT_ONCE = 1024  # examples whose rows are in memory
_PER_RUN = 10  # evaluations and checkpoints, unless options say otherwise

Evaluated = Callable[[int, Mapping[str, float], Path], None]  # step, metrics, the checkpoint's folder


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    num_steps: int
    best_loss: float | None  # of evaluations
    best_step: int | None

    @property
    def is_done(self) -> bool:
        return self.step == self.num_steps


class Training:
    """One run, in its folder. It begins where the last checkpoint ended, or at step 0.

    Between two steps everything that a step depends on is: parameters, moments, the step's number. Nothing is drawn
    at random. All of it is in a checkpoint, so a resumed run does what an uninterrupted one does, bit by bit, on a
    device whose kernels do.
    """

    def __init__(
        self,
        model: AdaptedModel,
        base_name: str,  # for people, in checkpoints
        objective: Objective,
        batches: Batches,
        options: LoopOptions,
        folder: RunFolder,
        *,
        held_out: Batches | None = None,  # for evaluations
        logs: Sequence[Log] = (),
        evaluated: Evaluated | None = None,  # called after each evaluation or, if there is none, at the end
    ) -> None:
        self._model, self._adapter, self._base_name = model, model.adapter, base_name
        self._objective, self._batches, self._held_out = objective, batches, held_out
        self._options, self._folder, self._logs, self._evaluated = options, folder, logs, evaluated
        self._order = DataOrder(len(batches), options.batch_size, options.seed)
        self.num_steps = options.max_steps or self._order.num_steps(options.num_epochs)
        warmup = min(math.ceil(options.warmup_ratio * self.num_steps), self.num_steps - 1)
        self._schedule = Schedule(options.learning_rate, self.num_steps, warmup, options.decay)
        self._optimiser = Optimiser(self._adapter)
        seldom = math.ceil(self.num_steps / _PER_RUN)
        self._eval_every = options.eval_every or seldom
        self._save_every = options.save_every or seldom
        self._load(folder.state())

    @property
    def num_epochs(self) -> float:
        """How often each example is read in the whole run."""
        return self.num_steps / self._order.steps_per_epoch

    def _load(self, state: TrainingState) -> None:
        if state.step:
            self._optimiser.load(state.tensors)
        self.step, self._num_tokens = state.step, state.num_tokens
        self._best_loss, self._best_step = state.best_loss, state.best_step
        self._window = Averages(state.window)
        if self._folder.lacks_best(state):
            self._save_best()

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train to the end, or until `should_stop` says so between two steps; then a checkpoint is kept.

        A run that was at its end before calls `evaluated` again, with no metrics: the process may have been killed
        before it did so, or a push may have failed. Raises LossNotFinite, MemoryExceeded and CheckpointNotWritten. Each
        leaves the last checkpoint as it was.
        """
        for log in self._logs:
            log.begin(self.step)
        is_saved = self.step == self.num_steps
        if is_saved and self._evaluated is not None:
            self._evaluated(self.step, {}, self._folder.last)
        while self.step < self.num_steps:
            if should_stop():
                if not is_saved:
                    self._save()
                break
            try:
                self._train_step()
                is_saved = self._after_step()
            except torch.OutOfMemoryError as error:
                raise MemoryExceeded(
                    f"after step {self.step}: the device's memory is full, with rows of up to "
                    f"{self._options.row_tokens} tokens ({str(error)[:200]}); the last checkpoint is as it was. Choose "
                    "a smaller --row-tokens, or --gradient-checkpointing"
                ) from error
        return Outcome(self.step, self.num_steps, self._best_loss, self._best_step)

    def _train_step(self) -> None:
        """One update from the rows of one batch, whose loss is averaged over all of its tokens or pairs."""
        self._learning_rate = self._schedule.at(self.step)
        rows = self._batches.rows(self._order.at(self.step))
        try:
            losses = backward(self._model, self._objective, self._batches, rows)
            weight = sum(loss.weight for loss in losses)
            norm = self._optimiser.step(self._learning_rate, self._options.adam, weight=weight)
        except LossNotFinite as error:
            named = self._batches.named(rows)
            raise LossNotFinite(f"step {self.step + 1} ({named}): {error}; the last checkpoint is as it was") from error
        self.step += 1
        self._num_tokens += sum(int((row.documents != NONE).sum()) for row in rows)
        for loss in losses:
            self._window.add_loss(loss)
        self._window.add("grad_norm", norm, 1)

    def _after_step(self) -> bool:
        """Log, evaluate and save what is due. True if a checkpoint has this step."""
        is_last = self.step == self.num_steps
        if is_last or self.step % self._options.log_every == 0:
            self._log(self._window.means() | {"learning_rate": self._learning_rate})
            self._window = Averages()
        metrics, earlier_best = None, self._best_step
        if self._held_out is not None and (is_last or self.step % self._eval_every == 0):
            metrics = self._evaluate(self._held_out)
        if is_last or metrics is not None or self.step % self._save_every == 0:
            self._save()
            if self._best_step != earlier_best:
                self._save_best()
            if self._evaluated is not None and (metrics is not None or (is_last and self._held_out is None)):
                self._evaluated(self.step, metrics or {}, self._folder.last)
            return True
        return False

    def _evaluate(self, held_out: Batches) -> dict[str, float]:
        """Log the metrics of the held-out examples, and note if they are the best."""
        try:
            averages = evaluate(self._model, self._objective, held_out)
        except LossNotFinite as error:
            raise LossNotFinite(f"step {self.step}, evaluation: {error}; the last checkpoint is as it was") from error
        metrics = {f"eval_{name}": value for name, value in averages.items()}
        self._log(metrics)
        loss = metrics["eval_loss"]
        if self._best_loss is None or loss < self._best_loss:
            self._best_loss, self._best_step = loss, self.step
        return metrics

    def _save_best(self) -> None:
        """Keep this step as the best one. After `_save`: a kill in between is mended by `_load`."""
        assert self._best_loss is not None
        self._folder.save_best(self.step, self._best_loss, self._write_adapter)

    def _save(self) -> None:
        for name, parameter in self._adapter.named_parameters():
            if not torch.isfinite(parameter).all():
                raise LossNotFinite(
                    f"step {self.step}: {name} is not finite any more; the last checkpoint is as it was. Lower the "
                    "learning rate"
                )
        state = TrainingState(
            step=self.step,
            tensors=self._optimiser.tensors(),
            num_tokens=self._num_tokens,
            best_loss=self._best_loss,
            best_step=self._best_step,
            window=self._window.sums(),
        )
        self._folder.save_last(state, self._write_adapter)

    def _write_adapter(self, folder: Path) -> None:
        write_adapter(self._adapter, folder, self._base_name)

    def _log(self, metrics: Mapping[str, float]) -> None:
        line = {**metrics, "num_tokens": self._num_tokens, "epoch": self.step / self._order.steps_per_epoch}
        for log in self._logs:
            log.write(self.step, line)


def backward(model: Scorer, objective: Objective, batches: Batches, rows: Sequence[Row]) -> list[Loss]:
    """The losses of rows, whose gradients are added up. Raises LossNotFinite, naming examples."""
    losses = []
    for row in rows:
        losses.append(objective(model, row))
        losses[-1].total.backward()
    for row, loss in zip(rows, losses, strict=True):  # not at once: that would wait for the device
        _require_finite(loss, batches, row)
    return losses


def _require_finite(loss: Loss, batches: Batches, row: Row) -> None:
    if not loss.total.isfinite():
        raise LossNotFinite(
            f"the loss is {loss.total.item()}; lower the learning rate, or look at {batches.named([row])}"
        )


def evaluate(model: Scorer, objective: Objective, batches: Batches) -> dict[str, float]:
    """Means over all examples, with the loss first, without gradients. Raises LossNotFinite, naming examples."""
    averages = Averages()
    with torch.no_grad():
        for first in range(0, len(batches), _EVALUATED_AT_ONCE):
            for row in batches.rows(range(first, min(first + _EVALUATED_AT_ONCE, len(batches)))):
                loss = objective(model, row)
                _require_finite(loss, batches, row)
                averages.add_loss(loss)
    return averages.means()
