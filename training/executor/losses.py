"""The losses of the Tinker API: sums over tokens, never means. The client owns the scale.

Each maps the log-probabilities of some targets and the inputs of the loss, both [num_targets], to a scalar, so a pass
can be computed in parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`inputs` are required, beside the targets; `weight` is the one that is 0 wherever nothing is learned."""

    compute: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    inputs: tuple[str, ...]
    weight: str
    defaults: Config = field(default_factory=dict)  # what may be configured


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, _: Config) -> torch.Tensor:
    return -(inputs["weights"] * logprobs).sum()


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, _: Config) -> torch.Tensor:
    return -(_ratios(logprobs, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratios, advantages = _ratios(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratios * advantages, _clipped(ratios, config) * advantages).sum()


def _cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratios = _clipped(_ratios(logprobs, inputs), config).detach()
    return -(ratios * logprobs * inputs["advantages"]).sum()


def _ratios(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Of the policy to the sampler."""
    return torch.exp(logprobs - inputs["logprobs"])


def _clipped(ratios: torch.Tensor, config: Config) -> torch.Tensor:
    return ratios.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


_POLICY = ("logprobs", "advantages")

LOSSES = {
    "cross_entropy": TokenLoss(_cross_entropy, ("weights",), "weights"),
    "importance_sampling": TokenLoss(_importance_sampling, _POLICY, "advantages"),
    "ppo": TokenLoss(_ppo, _POLICY, "advantages", _CLIP),
    "cispo": TokenLoss(_cispo, _POLICY, "advantages", _CLIP),
}
