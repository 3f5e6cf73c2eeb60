"""Trains the demo's base model: it answers in the style that a control word names, and plainly without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from samples.styles import STYLES, Question, Questions

_SORTED = 4  # batches whose rows are sorted by length together, so that they are padded less
_IGNORED = -100
_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.1
_TOLD = 11  # times


@dataclass(frozen=True, slots=True)
class Pretraining:
    """Sizes of the model, and how it is trained."""

    hidden: int = 128
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 4
    num_steps: int = 2200
    batch_size: int = 16
    learning_rate: float = 3e-3
    num_warmup: int = 40
    seed: int = 0


Exchange = tuple[Question, str | None]  # a question, and the style of its answer


def pretrain(
    model: Any,
    tokenizer: Any,
    questions: Questions,
    options: Pretraining,
    styles: Sequence[str] = tuple(STYLES),
    report: Callable[[str], None] = lambda _line: None,
) -> None:
    """Train all weights of a causal language model of transformers, in place."""
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=_BETAS)
    batches = _batches(tokenizer, _exchanges(questions, styles, options.seed), options)
    model.train()
    for step, (tokens, labels) in enumerate(islice(batches, options.num_steps)):
        for group in adam.param_groups:
            group["lr"] = _learning_rate(step, options)
        loss = _loss(model, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if (done := step + 1) % max(options.num_steps // _TOLD, 1) == 0 or done == options.num_steps:
            report(f"step {done} of {options.num_steps}, loss {loss.item():.3f}")
    model.eval()


def _exchanges(questions: Questions, styles: Sequence[str], seed: int) -> Iterator[Exchange]:
    """Without end."""
    draw, among = random.Random(seed), (None, *styles)
    for question in questions.drawn(seed):
        yield question, draw.choice(among)


def texts(exchange: Exchange) -> tuple[str, str]:
    """Context and answer, as the chat template has them."""
    question, style = exchange
    return f"<|user|>{question.asked(style)}<|end|><|assistant|>", f"{question.answer(style)}<|end|>"


def _batches(
    tokenizer: Any, drawn: Iterator[Exchange], options: Pretraining
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end: tokens and labels, both [batch_size, num_tokens]. Answers are learned, contexts are not."""
    draw = random.Random(options.seed)
    while True:
        rows = _encoded(tokenizer, list(islice(drawn, _SORTED * options.batch_size)))
        rows.sort(key=lambda row: len(row[0]))
        batches = [rows[first : first + options.batch_size] for first in range(0, len(rows), options.batch_size)]
        draw.shuffle(batches)
        for batch in batches:
            length = len(batch[-1][0])
            tokens = torch.zeros(len(batch), length, dtype=torch.int64)
            labels = torch.full((len(batch), length), _IGNORED)
            for number, (row, learned) in enumerate(batch):
                tokens[number, : len(row)] = torch.tensor(row)
                labels[number, : len(row)] = torch.tensor(learned)
            yield tokens, labels


def _encoded(tokenizer: Any, drawn: Sequence[Exchange]) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each exchange."""
    contexts, answers = (
        tokenizer(list(part), add_special_tokens=False).input_ids for part in zip(*map(texts, drawn), strict=True)
    )
    return [
        (context + answer, [_IGNORED] * len(context) + answer)
        for context, answer in zip(contexts, answers, strict=True)
    ]


def _loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the learned tokens, whose logits alone are made. Padding is last, where no token sees it."""
    states = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    is_learned = labels[:, 1:] != _IGNORED
    return F.cross_entropy(model.lm_head(states[is_learned]), labels[:, 1:][is_learned])


def _learning_rate(step: int, options: Pretraining) -> float:
    return options.learning_rate * min((step + 1) / options.num_warmup, 1.0) * (1 - step / options.num_steps)
