"""Computes a pass: data to trees, trees to rows, one backward pass per row.

A run of answer targets [first, end) is a branch that follows the first + 1 inputs before it, so equal contexts of one
request are read once. Rows hold the data of one pass only: what else is computed meanwhile changes no bit of it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from training.adapted_model import AdaptedModel
from training.errors import LossNotFinite
from training.executor.losses import LOSSES
from training.executor.operations import Datum, Pass, Scored
from training.tree.documents import Branch, Document, merge
from training.tree.packing import pack
from training.tree.rows import Row


class Run(NamedTuple):
    """A run of answer targets of one datum."""

    datum: int
    first: int
    end: int


def compute(model: AdaptedModel, task: Pass, row_tokens: int) -> Scored:
    """The result of a pass; its gradient is added to that of the adapter.

    Raises DocumentInvalid and LossNotFinite; then a part of the gradient may have been added.
    """
    documents, runs = _documents(task.data)
    logprobs = [np.zeros(len(datum.targets) // 4, np.float32) for datum in task.data]
    loss_sum = 0.0
    with torch.set_grad_enabled(not task.forward_only):
        for row in pack(merge(documents, row_tokens), row_tokens):
            in_row = [runs[branch.example] for branch in row.answers]
            scores = model.score(row)
            inputs = _inputs(task, in_row, scores.logprobs)
            loss = LOSSES[task.loss].compute(scores.logprobs, inputs, {**LOSSES[task.loss].defaults, **task.config})
            if not math.isfinite(total := loss.item()):
                raise LossNotFinite(f"the loss is {total}; look at the inputs of the loss, or lower the learning rate")
            loss_sum += total
            if not task.forward_only:
                loss.backward()
            _scatter(scores.logprobs, in_row, row, logprobs)
    return Scored(loss_sum, tuple(each.tobytes() for each in logprobs))


def _documents(data: Sequence[Datum]) -> tuple[list[Document], list[Run]]:
    """A document for each run, whose branch's example is the run's number."""
    documents: list[Document] = []
    runs: list[Run] = []
    for number, datum in enumerate(data):
        tokens, targets = datum.token_ids, datum.target_ids
        for first, end in datum.answers:
            branch = Branch(first + 1, targets[first:end], example=len(runs))
            documents.append(Document(tokens[: first + 1], (branch,)))
            runs.append(Run(number, first, end))
    return documents, runs


def _inputs(task: Pass, runs: Sequence[Run], like: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The inputs of the loss for the targets of a row, in its order."""
    return {
        name: torch.from_numpy(np.concatenate([task.data[run.datum].input(name)[run.first : run.end] for run in runs]))
        .to(like)  # device and dtype
        for name in LOSSES[task.loss].inputs
    }  # fmt: skip


def _scatter(scores: torch.Tensor, runs: Sequence[Run], row: Row, to: Sequence[np.ndarray]) -> None:
    parts = scores.detach().float().cpu().numpy()
    first = 0
    for run, branch in zip(runs, row.answers, strict=True):
        to[run.datum][run.first : run.end] = parts[first : first + len(branch.tokens)]
        first += len(branch.tokens)
