"""One adapter in training: parameters, moments, the gradient so far."""

import math
from pathlib import Path

import torch

from adapters.model.base_model import BaseModel
from training.adapted_model import AdaptedModel
from training.errors import LossNotFinite, OptionInvalid
from training.executor.operations import Done, Pass, Scored, Spec, Step
from training.executor.passes import compute
from training.loop.optimiser import AdamOptions, Optimiser
from training.loop.state import TrainingState
from training.loop.whole_folder import replace_folder, settle
from training.trainable.adapter import TrainableAdapter
from training.trainable.files import write_adapter
from training.trainable.packed import ServedWeights, served_weights

_STATE = "training"  # folder in a checkpoint, beside the adapter's files


class Learner:
    """Belongs to one thread. What fails changes neither parameters nor moments."""

    def __init__(self, spec: Spec, base: BaseModel, device: torch.device | str) -> None:
        """All of it is in the device's memory from now on. Raises AdapterUntrainable."""
        self.adapter = TrainableAdapter.create(spec.of_adapter(), base, seed=spec.seed).to(device)
        self.lost: str | None = None  # why the gradient is not whole
        self._optimiser = Optimiser(self.adapter)

    @property
    def num_bytes(self) -> int:
        """Of the parameters, and of their two moments, which are as large."""
        return 3 * sum(each.nbytes for each in self.adapter.parameters())

    def run(self, task: Pass, model: AdaptedModel, row_tokens: int) -> Scored:
        """Raises TrainingError; then the gradient is not whole."""
        return compute(model, task, row_tokens)

    def lose(self, why: str) -> None:
        """A pass of this step failed: the step must fail, too, or it would use a part of the gradient."""
        self.lost = self.lost or why

    def drop(self) -> None:
        """Forget the gradient so far."""
        self._optimiser.clear()
        self.lost = None

    def step(self, task: Step) -> Done:
        """Raises TrainingError. However it ends, the gradient is used up."""
        try:
            if self.lost is not None:
                raise OptionInvalid(
                    f"a pass before this step failed ({self.lost}), and a step would use a part of the gradient only: "
                    "it is dropped. Send the passes of this step again"
                )
            betas = (task.beta1, task.beta2)
            options = AdamOptions(betas, task.epsilon, task.weight_decay, max_grad_norm=task.max_grad_norm)
            before = {name: each.clone() for name, each in self._optimiser.tensors().items()}
            norm = self._optimiser.step(task.learning_rate, options)
            if not torch.nn.utils.get_total_norm(self.adapter.parameters(), math.inf).isfinite():  # as with eps=0: 0/0
                self._optimiser = Optimiser(self.adapter)
                self._optimiser.load(before)
                raise LossNotFinite("the step would make parameters infinite; raise eps, or lower the learning rate")
            return Done({"grad_norm": norm})
        finally:
            self.drop()

    def save(self, folder: Path, seq: int, base_name: str, *, with_gradient: bool = False) -> None:
        """Write a checkpoint, whole and durable. `with_gradient`: also the one so far. Raises OSError."""
        tensors = self._optimiser.tensors() | (self._optimiser.gradients() if with_gradient else {})

        def write(partial: Path) -> None:
            write_adapter(self.adapter, partial, base_name)
            (partial / _STATE).mkdir()
            TrainingState(seq, tensors).write(partial / _STATE)

        folder.parent.mkdir(parents=True, exist_ok=True)
        replace_folder(folder, write)

    def load(self, folder: Path, *, whole: bool) -> int:
        """Begin from a checkpoint, without its moments unless it is `whole`; returns its number.

        Raises CheckpointDamaged.
        """
        settle(folder)
        state = TrainingState.read(folder / _STATE)
        self._optimiser.load(state.tensors, with_moments=whole)
        return state.step

    def export(self, dtype: torch.dtype) -> ServedWeights:
        """What samplers of this adapter load. Raises AdapterUntrainable."""
        return served_weights(self.adapter, dtype)
