"""Evaluates an adapter on held-out rows with the float32 reference that engines are tested against.

Prompts are read one by one with the adapter, answers are generated over their KV cache without it (or with it, for
positions "all"), as serving does (adapters/verification/reference.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adapters.errors import AdapterError
from adapters.formats import read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import Manifest
from adapters.model.normal_form import Adapter, Positions
from adapters.verification.reference import UNLIMITED, answer
from training.data.examples import Example
from training.errors import OptionInvalid
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


def evaluate_directory(
    model: Any, tokenizer: Any, examples: Sequence[Example], directory: Path, positions: Positions | None = None
) -> Evaluation:
    """Evaluate an adapter's directory, of any format. `positions` overrides its own. Raises OptionInvalid."""
    try:
        adapter = read_adapter(directory, BaseModel.read(model.config.name_or_path), UNLIMITED)
    except AdapterError as error:
        raise OptionInvalid(f"{directory}: {error}") from error
    if positions is not None:
        adapter = replace(adapter, positions=positions)
    return _evaluate(model, tokenizer, examples, adapter, str(directory))


def evaluate_base(model: Any, tokenizer: Any, examples: Sequence[Example]) -> Evaluation:
    """The same for the model without an adapter."""
    return _evaluate(model, tokenizer, examples, None, NO_ADAPTER)


def _evaluate(
    model: Any, tokenizer: Any, examples: Sequence[Example], adapter: Adapter | None, name: str
) -> Evaluation:
    answered = []
    ends = end_ids(model.config, model.generation_config)
    with torch.inference_mode():
        for example in examples:
            for turn in example.turns:
                expected = list(turn.answers[0])
                given = answer(model, adapter, turn.context, len(expected)).tokens
                scored = answer(model, adapter, turn.context, expected)
                answered.append(
                    AnsweredTurn(
                        where=example.where,
                        expected=shown_text(tokenizer, expected, ends),
                        given=shown_text(tokenizer, given, ends),
                        is_exact=given == expected,
                        loss=-math.fsum(scored.logprobs),
                        num_tokens=len(expected),
                    )
                )
    if adapter is None:
        return Evaluation(name, None, None, 0, tuple(answered))
    num_parameters = Manifest.of(adapter).num_parameters
    return Evaluation(name, adapter.positions, adapter.max_rank, num_parameters, tuple(answered))


def shown_text(tokenizer: Any, tokens: Sequence[int], ends: Iterable[int]) -> str:
    """An answer for people: up to its first end-of-sequence token, one of `ends` or the tokenizer's."""
    stops = {tokenizer.eos_token_id, *ends}
    length = next((number for number, token in enumerate(tokens) if token in stops), len(tokens))
    return tokenizer.decode(tokens[:length], skip_special_tokens=True)
