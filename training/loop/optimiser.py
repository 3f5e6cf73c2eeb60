"""AdamW over an adapter's float32 masters, with gradient clipping and a state that resumes exactly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from training.errors import CheckpointDamaged, LossNotFinite, OptionInvalid

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """As torch.optim.AdamW has them. `max_grad_norm` 0: gradients are not clipped. Raises OptionInvalid."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        # torch takes a negative norm, and then maximises the loss.
        for name, value in (("weight decay", self.weight_decay), ("largest gradient norm", self.max_grad_norm)):
            if value < 0 or not math.isfinite(value):
                raise OptionInvalid(f"the {name} is {value:g}; it must be 0 or a positive, finite number")


class Optimiser:
    """Updates the parameters of an adapter from the gradients that were accumulated in them."""

    def __init__(self, adapter: torch.nn.Module) -> None:
        self._parameters, self._buffers = dict(adapter.named_parameters()), dict(adapter.named_buffers())
        self._adam = torch.optim.AdamW(self._parameters.values())

    def step(self, learning_rate: float, options: AdamOptions, *, weight: float = 1) -> float:
        """Clip, update, clear the gradients; returns their norm before clipping.

        `weight`: what the gradients, which are of a sum, are divided by first. Raises LossNotFinite, and changes no
        parameter, if the norm is NaN or infinite.
        """
        gradients = [each.grad for each in self._parameters.values() if each.grad is not None]
        if weight != 1:
            torch._foreach_div_(gradients, weight)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise LossNotFinite(
                f"the gradient's norm is {norm.item()}; lower the learning rate, or look at the step's examples"
            )
        if options.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), options.max_grad_norm, norm)
        self._adam.param_groups[0] |= {
            "lr": learning_rate,
            "betas": options.betas,
            "eps": options.epsilon,
            "weight_decay": options.weight_decay,
        }
        self._adam.step()
        self.clear()
        return norm.item()

    def clear(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, moments and buffers by name. Not copies."""
        found = {f"parameter/{name}": each.detach() for name, each in self._parameters.items()}
        for name, each in self._parameters.items():
            state = self._adam.state.get(each, {})
            found |= {f"{moment}/{name}": state[moment] for moment in _MOMENTS if moment in state}
        return found | {f"buffer/{name}": each for name, each in self._buffers.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """What has been accumulated since the last step, by name. Not copies."""
        return {f"gradient/{name}": each.grad for name, each in self._parameters.items() if each.grad is not None}

    def load(self, tensors: Mapping[str, torch.Tensor], *, with_moments: bool = True) -> None:
        """Take over what `tensors` and `gradients` returned. Raises CheckpointDamaged if it is of other parameters."""
        for name, each in self._parameters.items():
            saved = tensors.get(f"parameter/{name}")
            if saved is None or saved.shape != each.shape or saved.dtype != each.dtype:
                found = "none" if saved is None else f"{saved.dtype} {list(saved.shape)}"
                raise CheckpointDamaged(
                    f"parameter {name} is {each.dtype} {list(each.shape)}; the checkpoint has {found}"
                )
            with torch.no_grad():
                each.copy_(saved)
            state = {moment: tensors[key] for moment in _MOMENTS if (key := f"{moment}/{name}") in tensors}
            if state and with_moments:
                # The count of steps stays on the CPU, as torch has it.
                self._adam.state[each] = {
                    moment: value.clone() if moment == "step" else value.to(each.device, copy=True)
                    for moment, value in state.items()
                }
            if with_moments and (gradient := tensors.get(f"gradient/{name}")) is not None:
                each.grad = gradient.to(each.device, copy=True)
        for name, each in self._buffers.items():
            each.copy_(tensors[f"buffer/{name}"])
