"""How far a student's next tokens are from its teacher's: KL(teacher || student) over the whole vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from training.adapted_model import AdaptedModel
from training.losses import Loss, Scorer
from training.tree.rows import Row

_TOKENS_AT_ONCE = 512  # the logits of both are in memory together: 600 MB for 150,000 tokens of vocabulary in float32

Head = Callable[[torch.Tensor], torch.Tensor]


def divergence(head: Head, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """[num_tokens] KL, of final hidden states [num_tokens, hidden] of both. Gradients reach the student's.

    Logits are made for some tokens at a time, and again in the backward pass.
    """
    parts = zip(teacher.split(_TOKENS_AT_ONCE), student.split(_TOKENS_AT_ONCE), strict=True)
    return torch.cat(
        [checkpoint(_divergence, head, *each, use_reentrant=False, preserve_rng_state=False) for each in parts]
    )


def _divergence(head: Head, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        expected = head(teacher).float().log_softmax(dim=-1)
    return (expected.exp() * (expected - head(student).float().log_softmax(dim=-1))).sum(dim=-1)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The objective: the divergence from a teacher on answers, whichever of the two gave them."""

    states: Sequence[torch.Tensor]  # the teacher's, by example: those that predict its answer [tokens, hidden]

    def __call__(self, model: Scorer, row: Row) -> Loss:
        assert isinstance(model, AdaptedModel)
        row = row.to(model.model.device)
        student = model.hidden(row).index_select(0, row.predictors)
        teacher = torch.cat([self.states[branch.example] for branch in row.answers]).to(student.device)
        total = divergence(model.model.get_output_embeddings(), teacher, student).sum()
        return Loss(total, row.num_targets)
