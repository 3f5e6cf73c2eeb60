"""Evaluates an adapter on held-out rows, as serving applies it (`training.runs.answers`)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapters.errors import AdapterError
from adapters.formats import read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest
from adapters.model.normal_form import Adapter, Positions
from adapters.verification.reference import UNLIMITED
from training.data.examples import Example
from training.errors import OptionInvalid
from training.runs.answers import Question, answers
from training.runs.base import end_ids

NO_ADAPTER = "no adapter"


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """One prompt."""

    where: str  # file and row
    expected: str
    given: str  # generated greedily, at most as many tokens as are expected
    is_exact: bool  # token for token, the end included
    loss: float  # negative log-likelihood of the expected answer, summed over its tokens
    num_tokens: int  # of it


Answered = Callable[[AnsweredTurn], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One adapter, or the base model, on all prompts."""

    name: str
    positions: Positions | None  # None: no adapter
    max_rank: int | None
    num_parameters: int
    turns: tuple[AnsweredTurn, ...]

    @property
    def loss(self) -> float:
        """Mean over tokens."""
        return math.fsum(turn.loss for turn in self.turns) / sum(turn.num_tokens for turn in self.turns)

    @property
    def exact_match(self) -> float:
        """The part of the prompts whose answer is exactly the expected one."""
        return sum(turn.is_exact for turn in self.turns) / len(self.turns)


def read_for(model: Any, directory: Path, positions: Positions | None = None) -> Adapter:
    """The adapter in a directory of any format, for a model that was loaded from one. Raises OptionInvalid.

    `positions` override its own.
    """
    try:
        adapter = read_adapter(directory, BaseModel.read(model.config.name_or_path), UNLIMITED)
    except AdapterError as error:
        raise OptionInvalid(f"{directory}: {error}") from error
    return adapter if positions is None else replace(adapter, positions=positions)


def evaluate_adapter(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    adapter: Adapter | None = None,
    name: str = NO_ADAPTER,
    answered: Answered | None = None,
) -> Evaluation:
    """Evaluate an adapter, or the model without any. `answered` gets each turn as soon as it is answered."""
    ends = end_ids(model.config, model.generation_config)
    asked = [(example.where, turn) for example in examples for turn in example.turns]
    questions = [Question(turn.context, len(turn.answers[0]), turn.answers[0]) for _, turn in asked]
    turns: dict[int, AnsweredTurn] = {}
    for number, given in answers(model, adapter, questions, ends | {tokenizer.eos_token_id}):
        expected = list(questions[number].expected)
        turns[number] = AnsweredTurn(
            where=asked[number][0],
            expected=shown_text(tokenizer, expected, ends),
            given=shown_text(tokenizer, given.tokens, ends),
            is_exact=given.tokens == expected,
            loss=given.loss,
            num_tokens=len(expected),
        )
        if answered is not None:
            answered(turns[number])
    in_order = tuple(turns[number] for number in range(len(asked)))
    if adapter is None:
        return Evaluation(name, None, None, 0, in_order)
    return Evaluation(name, adapter.positions, adapter.max_rank, Manifest.of(adapter).num_parameters, in_order)


def shown_text(tokenizer: Any, tokens: Sequence[int], ends: Iterable[int]) -> str:
    """An answer for people: up to its first end-of-sequence token, one of `ends` or the tokenizer's."""
    stops = {tokenizer.eos_token_id, *ends}
    length = next((number for number, token in enumerate(tokens) if token in stops), len(tokens))
    return tokenizer.decode(tokens[:length], skip_special_tokens=True)
