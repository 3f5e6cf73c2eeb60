"""Log-probabilities of a row's targets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from training.tree.rows import Row

_TARGETS_AT_ONCE = 1024  # their logits are in memory together: 600 MB for 150,000 tokens of vocabulary in float32


@dataclass(frozen=True, slots=True, eq=False)
class TargetScores:
    """What the model makes of each target of a row, in the row's order."""

    logprobs: torch.Tensor  # [num_targets], float32 or wider
    correct: torch.Tensor  # [num_targets] bool: the target is the most likely token

    def of_answers(self, row: Row) -> torch.Tensor:
        """[answers] the log-probability of each answer."""
        branches = row.target_branches.to(self.logprobs.device)
        return self.logprobs.new_zeros(len(row.answers)).index_add(0, branches, self.logprobs)


def score_targets(hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], row: Row) -> TargetScores:
    """Score a row's targets from final hidden states [num_tokens, hidden].

    Logits are made for some targets at a time, and again in the backward pass, so that they never are in memory for a
    whole row.
    """
    states = hidden.index_select(0, row.predictors)
    parts = [
        checkpoint(_score, head, some, tokens, use_reentrant=False, preserve_rng_state=False)
        for some, tokens in zip(states.split(_TARGETS_AT_ONCE), row.target_tokens.split(_TARGETS_AT_ONCE), strict=True)
    ]
    return TargetScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def _score(
    head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(states)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return chosen - logits.logsumexp(dim=1), logits.detach().argmax(dim=1) == tokens
