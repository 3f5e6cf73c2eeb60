"""Greedy answers to many prompts: batches over one KV cache, as serving makes them one by one.

The prompt is read with the adapter. Decoding uses base weights over the same KV cache or, for positions "all", the
adapter. `adapters.verification.reference` is the same for one prompt, and what this is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from adapters.model.normal_form import Adapter, Positions
from adapters.verification.reference import adapted

_TOKENS_AT_ONCE = 8192  # of prompts and answers, padded: their KV is in memory together
_PROMPTS_AT_ONCE = 64
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
    everywhere = adapter is not None and (positions or adapter.positions) == "all"
    for batch in _batches(questions):
        found = _answered(model, adapter, everywhere, [questions[each] for each in batch], ends)
        yield from zip(batch, found, strict=True)


def _batches(questions: Sequence[Question]) -> Iterator[list[int]]:
    def size(number: int) -> tuple[int, int]:
        question = questions[number]
        return len(question.context), max(question.num_tokens, len(question.expected))

    batch: list[int] = []
    longest_context = longest_answer = 0
    for number in sorted(range(len(questions)), key=size, reverse=True):
        context, answer = size(number)
        longest_context, longest_answer = max(longest_context, context), max(longest_answer, answer)
        num_tokens = (len(batch) + 1) * (longest_context + longest_answer)
        if batch and (num_tokens > _TOKENS_AT_ONCE or len(batch) == _PROMPTS_AT_ONCE):
            yield batch
            batch, longest_context, longest_answer = [], context, answer
        batch.append(number)
    if batch:
        yield batch


@torch.inference_mode()
def _answered(
    model: Any, adapter: Adapter | None, everywhere: bool, questions: Sequence[Question], ends: Set[int]
) -> list[Answer]:
    from transformers import DynamicCache

    cache = DynamicCache()
    longest = max(len(each.context) for each in questions)
    padded = [[0] * (longest - len(each.context)) + list(each.context) for each in questions]
    tokens = torch.tensor(padded, device=model.device)
    lengths = torch.tensor([len(each.context) for each in questions], device=model.device)
    mask = (torch.arange(longest, device=model.device) >= longest - lengths[:, None]).long()  # prompts end together
    with nullcontext() if adapter is None else adapted(model, adapter):
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    first = output.logits[:, -1]
    with adapted(model, adapter) if adapter is not None and everywhere else nullcontext():
        losses = _losses(model, questions, cache, mask, lengths, first)
        cache.crop(longest)
        found = _generated(model, questions, cache, mask, lengths, first, ends)
    return [Answer(each, loss) for each, loss in zip(found, losses, strict=True)]


def _losses(
    model: Any,
    questions: Sequence[Question],
    cache: Any,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor,
) -> list[float]:
    """Of the expected answers, which are read in one pass behind the prompts."""
    sizes = [len(each.expected) for each in questions]
    if not any(sizes):
        return [0.0] * len(questions)
    width = max(sizes)
    padded = [[*each.expected, *[0] * (width - len(each.expected))] for each in questions]
    expected = torch.tensor(padded, device=model.device)  # [questions, width]
    is_expected = torch.arange(width, device=model.device) < torch.tensor(sizes, device=model.device)[:, None]
    logprobs = torch.zeros(expected.shape, dtype=torch.float64, device=model.device)
    logprobs[:, 0] = _logprobs(first, expected[:, 0]).double()
    if width > 1:
        hidden = model.model(
            input_ids=expected[:, :-1],
            attention_mask=torch.cat([mask, torch.ones_like(expected[:, :-1])], dim=1),
            position_ids=lengths[:, None] + torch.arange(width - 1, device=model.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        scored = is_expected[:, 1:]
        states, targets = hidden[scored].split(_SCORED_AT_ONCE), expected[:, 1:][scored].split(_SCORED_AT_ONCE)
        head = model.get_output_embeddings()
        parts = [_logprobs(head(some), wanted) for some, wanted in zip(states, targets, strict=True)]
        logprobs[:, 1:][scored] = torch.cat(parts).double() if parts else logprobs.new_zeros(0)
    return (-(logprobs * is_expected).sum(dim=1)).tolist()


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=1)


def _generated(
    model: Any,
    questions: Sequence[Question],
    cache: Any,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    logits: torch.Tensor,
    ends: Set[int],
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in questions]
    in_cache = list(range(len(questions)))  # whose KV the rows of the cache are
    while True:
        chosen = logits.float().argmax(dim=-1)
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
            kept = torch.tensor(going, device=model.device)
            cache.batch_select_indices(kept)
            mask, lengths, chosen = mask[kept], lengths[kept], chosen[kept]
            in_cache = [in_cache[row] for row in going]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        logits = model(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=lengths[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        lengths = lengths + 1


def _is_complete(answer: Sequence[int], question: Question, ends: Set[int]) -> bool:
    return len(answer) >= question.num_tokens or (bool(answer) and answer[-1] in ends)
