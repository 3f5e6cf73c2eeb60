"""What a conversion has kept of its teacher, measured on held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.model.normal_form import Adapter, Positions
from training.conversion.divergence import divergence
from training.runs.answers import Question, answers, expected_states
from training.runs.base import LoadedBase


@dataclass(frozen=True, slots=True)
class Fidelity:
    """An adapter beside its teacher, whose greedy answers are the right ones."""

    agreement: float  # share of the prompts that are answered token for token as the teacher does
    agreed_tokens: float  # share of an answer before the first difference, mean over prompts
    divergence: float  # KL from the teacher on its own answers, nats per token
    exact_match: float | None  # share of the answers in the rows that it gives; None: the rows have none


@dataclass(frozen=True, slots=True)
class Report:
    """One conversion."""

    teacher: str  # revision id
    data: str  # SHA-256 of the prompts' token ids
    num_prompts: int  # that were learned from
    num_held_out: int
    rank: int
    learning_rate: float
    num_steps: int  # done
    best_step: int  # whose adapter it is
    seconds: float
    teacher_exact_match: float | None
    before: Fidelity  # the teacher's own weights, applied to the prompt only
    after: Fidelity


@dataclass(frozen=True, slots=True)
class Measure:
    """Held-out prompts with their teacher's answers."""

    base: LoadedBase
    questions: Sequence[Question]  # `expected` is the teacher's answer
    states: Sequence[torch.Tensor]  # of the teacher on them
    wanted: Sequence[Sequence[int]]  # the rows' own answers; empty: none

    def fidelity(self, adapter: Adapter, positions: Positions) -> Fidelity:
        given = self.answers(adapter, positions)
        agreed = [_shared(each, question.expected) for each, question in zip(given, self.questions, strict=True)]
        lengths = [len(question.expected) for question in self.questions]
        return Fidelity(
            agreement=_mean([list(each) == list(q.expected) for each, q in zip(given, self.questions, strict=True)]),
            agreed_tokens=_mean([some / every for some, every in zip(agreed, lengths, strict=True)]),
            divergence=float(self._divergences(adapter, positions).mean()),
            exact_match=self.exact_match(given),
        )

    def answers(self, adapter: Adapter, positions: Positions) -> list[list[int]]:
        """Greedy ones, at most as long as the teacher's: what goes on is another answer."""
        ends = self.base.ends | {self.base.tokenizer.eos_token_id}
        asked = [Question(each.context, each.num_tokens) for each in self.questions]
        found = dict(answers(self.base.model, adapter, asked, ends, positions))
        return [found[number].tokens for number in range(len(asked))]

    def exact_match(self, given: Sequence[Sequence[int]]) -> float | None:
        """Against the rows' own answers."""
        pairs = [(list(each), list(wanted)) for each, wanted in zip(given, self.wanted, strict=True) if wanted]
        return _mean([each == wanted for each, wanted in pairs]) if pairs else None

    def _divergences(self, adapter: Adapter, positions: Positions) -> torch.Tensor:
        """KL of each of the teacher's tokens."""
        head, device = self.base.model.get_output_embeddings(), self.base.model.device
        student = expected_states(self.base.model, adapter, self.questions, positions)
        with torch.no_grad():
            found = [
                divergence(head, theirs.to(device), ours.to(device)).cpu().clamp(min=0)  # of rounding
                for theirs, ours in zip(self.states, student, strict=True)
            ]
        return torch.cat(found)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values)
