"""The student's training: steps until the held-out divergence stops falling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from training.adapted_model import AdaptedModel
from training.conversion.divergence import Divergence
from training.errors import MemoryExceeded
from training.loop.batches import Batches
from training.loop.data_order import DataOrder
from training.loop.optimiser import AdamOptions, Optimiser
from training.loop.schedule import Schedule
from training.loop.training import backward, evaluate
from training.trainable.adapter import TrainableAdapter

_EVALUATIONS = 10  # of all steps
_PATIENCE = 3  # evaluations without a lower divergence, after which it ends
_WARMUP = 0.05  # of all steps


@dataclass(frozen=True, slots=True)
class Taught:
    """Answers as rows, with what the teacher makes of them."""

    batches: Batches
    states: Sequence[torch.Tensor]  # by example


@dataclass(frozen=True, slots=True)
class Steps:
    """How many steps, and how large."""

    count: int
    batch_size: int  # examples a step
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended."""

    num_steps: int  # done
    best_step: int  # whose student is kept; 0: as it began
    divergence: float  # held-out, of that step


def train(
    model: Any, student: TrainableAdapter, learned: Taught, held_out: Taught, steps: Steps, told: TextIO
) -> Outcome:
    """Leave the student as it was at its best step, and the model as it was. Raises LossNotFinite, MemoryExceeded."""
    adapted = AdaptedModel(model, student, checkpointing=model.device.type != "cpu")  # CPUs have memory, and no time
    parameters = dict(student.named_parameters())
    order = DataOrder(len(learned.batches), steps.batch_size, steps.seed)
    schedule = Schedule(steps.learning_rate, steps.count, min(math.ceil(_WARMUP * steps.count), steps.count - 1))
    optimiser = Optimiser(student)
    objective, every = Divergence(learned.states), math.ceil(steps.count / _EVALUATIONS)
    try:
        best = evaluate(adapted, Divergence(held_out.states), held_out.batches)["loss"]
        kept, best_step, step = _copy(parameters), 0, 0
        while step < steps.count and step - best_step < _PATIENCE * every:
            losses = backward(adapted, objective, learned.batches, learned.batches.rows(order.at(step)))
            num_tokens = sum(loss.weight for loss in losses)
            optimiser.step(schedule.at(step), AdamOptions(), weight=num_tokens)
            step += 1
            if step % every == 0 or step == steps.count:
                found = evaluate(adapted, Divergence(held_out.states), held_out.batches)["loss"]
                learned_from = sum(loss.total.item() for loss in losses) / num_tokens
                numbers = f"divergence {learned_from:.4f}, held-out {found:.4f} nats a token"
                print(f"step {step} of {steps.count}: {numbers}", file=told, flush=True)
                if found < best:
                    best, best_step, kept = found, step, _copy(parameters)
    except torch.OutOfMemoryError as error:
        raise MemoryExceeded(
            f"the device's memory is full ({str(error)[:200]}); choose fewer --answer-tokens or shorter prompts"
        ) from error
    finally:
        adapted.detach()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return Outcome(step, best_step, best)


def _copy(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
