"""Greedy answers to many prompts: batches over one KV cache, as serving makes them one by one.

The prompt is read with the adapter. Decoding uses base weights over the same KV cache or, for positions "all", the
adapter.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from adapters.model.normal_form import Adapter, Positions
from adapters.verification.reference import adapted

# Of prompts and answers, padded: their KV is in memory together. A GPU takes as long for a few of them.
_TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65536}
_PROMPTS_AT_ONCE = {"cpu": 64, "cuda": 256}
_SCORED_AT_ONCE = 1024  # tokens whose logits are in memory together


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as token ids."""

    context: Sequence[int]
    num_tokens: int  # most tokens of the answer, at least 1
    expected: Sequence[int] = ()  # an answer to score


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model makes of a question."""

    tokens: list[int]  # chosen greedily, up to the first end or the limit
    loss: float  # negative log-likelihood of the expected answer, summed over its tokens; 0 without any


def answers(
    model: Any,
    adapter: Adapter | None,
    questions: Sequence[Question],
    ends: Set[int],
    positions: Positions | None = None,
) -> Iterator[tuple[int, Answer]]:
    """(number of the question, its answer), batch by batch, those with the longest prompts first.

    `ends` are the tokens that end an answer, `positions` override the adapter's.
    """
    for batch in _batches(questions, model.device.type):
        asked = [questions[each] for each in batch]
        with _read(model, adapter, positions, asked) as reading:
            losses = _losses(reading, asked)
            tokens = _generated(reading, asked, ends)
        yield from zip(batch, map(Answer, tokens, losses), strict=True)


def _batches(questions: Sequence[Question], device: str) -> Iterator[list[int]]:
    kind = "cuda" if device == "cuda" else "cpu"
    most_tokens, most_prompts = _TOKENS_AT_ONCE[kind], _PROMPTS_AT_ONCE[kind]

    def size(number: int) -> tuple[int, int]:
        question = questions[number]
        return len(question.context), max(question.num_tokens, len(question.expected))

    batch: list[int] = []
    longest_context = longest_answer = 0
    for number in sorted(range(len(questions)), key=size, reverse=True):
        context, answer = size(number)
        longest_context, longest_answer = max(longest_context, context), max(longest_answer, answer)
        num_tokens = (len(batch) + 1) * (longest_context + longest_answer)
        if batch and (num_tokens > most_tokens or len(batch) == most_prompts):
            yield batch
            batch, longest_context, longest_answer = [], context, answer
        batch.append(number)
    if batch:
        yield batch


def expected_states(
    model: Any, adapter: Adapter | None, questions: Sequence[Question], positions: Positions | None = None
) -> list[torch.Tensor]:
    """The final hidden states that predict each expected answer, [its tokens, hidden], on the CPU."""
    found: dict[int, torch.Tensor] = {}
    for batch in _batches(questions, model.device.type):
        asked = [questions[each] for each in batch]
        with _read(model, adapter, positions, asked) as reading:
            states = _states(reading, asked)
        found |= {number: each.cpu() for number, each in zip(batch, states, strict=True)}
    return [found[number] for number in range(len(questions))]


class _ReadingState:
    """Prompts that end together, and the KV of everything that was read after them."""

    def __init__(self, model: Any, contexts: Sequence[Sequence[int]]) -> None:
        from transformers import DynamicCache

        self.model, self._cache = model, DynamicCache()
        self.longest = max(map(len, contexts))
        lengths = torch.tensor([[len(each)] for each in contexts], device=model.device)
        mask = (torch.arange(self.longest, device=model.device) >= self.longest - lengths).long()
        tokens = [[0] * (self.longest - len(each)) + list(each) for each in contexts]
        self._mask = mask[:, :0]
        self.last = self.read(torch.tensor(tokens, device=model.device), mask)[:, -1]  # [rows, hidden]

    def read(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Final hidden states [rows, n, hidden] of [rows, n] tokens that follow."""
        self._mask = torch.cat([self._mask, torch.ones_like(tokens) if mask is None else mask], dim=1)
        output = self.model.model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :],
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def forget_answers(self) -> None:
        self._cache.crop(self.longest)
        self._mask = self._mask[:, : self.longest]

    def keep(self, rows: torch.Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]


@contextmanager
def _read(
    model: Any, adapter: Adapter | None, positions: Positions | None, questions: Sequence[Question]
) -> Iterator[_ReadingState]:
    """Read the prompts with the adapter, which acts in the block, too, if it is for all positions."""
    everywhere = adapter is not None and (positions or adapter.positions) == "all"
    with torch.no_grad():
        with nullcontext() if adapter is None else adapted(model, adapter):
            reading = _ReadingState(model, [each.context for each in questions])
        with adapted(model, adapter) if adapter is not None and everywhere else nullcontext():
            yield reading


def _states(reading: _ReadingState, questions: Sequence[Question]) -> list[torch.Tensor]:
    """Of the expected answers, which are read in one pass behind the prompts and then forgotten."""
    width = max(len(each.expected) for each in questions)
    states = reading.last[:, None]
    if width > 1:
        padded = [[*each.expected, *[0] * (width - len(each.expected))] for each in questions]
        rest = reading.read(torch.tensor(padded, device=states.device)[:, :-1])
        reading.forget_answers()
        states = torch.cat([states, rest], dim=1)
    return [each[: len(question.expected)] for each, question in zip(states, questions, strict=True)]


def _losses(reading: _ReadingState, questions: Sequence[Question]) -> list[float]:
    """Negative log-likelihoods of the expected answers."""
    head, states = reading.model.get_output_embeddings(), _states(reading, questions)
    wanted = [token for each in questions for token in each.expected]
    tokens = torch.tensor(wanted, dtype=torch.int64, device=reading.last.device)
    parts = zip(torch.cat(states).split(_SCORED_AT_ONCE), tokens.split(_SCORED_AT_ONCE), strict=True)
    scored = torch.cat([F.cross_entropy(head(some).float(), right, reduction="none") for some, right in parts])
    return [float(each.double().sum()) for each in scored.split([len(each.expected) for each in questions])]


def _generated(reading: _ReadingState, questions: Sequence[Question], ends: Set[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in questions]
    in_cache = list(range(len(questions)))  # whose KV the rows of the cache are
    head, states = reading.model.get_output_embeddings(), reading.last
    while True:
        chosen = head(states).float().argmax(dim=-1)
        going = []  # rows of the cache
        for row, token in enumerate(chosen.tolist()):
            answer, question = found[in_cache[row]], questions[in_cache[row]]
            if not _is_complete(answer, question, ends):
                answer.append(token)
                if not _is_complete(answer, question, ends):
                    going.append(row)
        if not going:
            return found
        if len(going) <= len(in_cache) // 2:  # copying the cache costs more than a few rows in vain
            kept = torch.tensor(going, device=chosen.device)
            reading.keep(kept)
            chosen, in_cache = chosen[kept], [in_cache[row] for row in going]
        states = reading.read(chosen[:, None])[:, -1]


def _is_complete(answer: Sequence[int], question: Question, ends: Set[int]) -> bool:
    return len(answer) >= question.num_tokens or (bool(answer) and answer[-1] in ends)
