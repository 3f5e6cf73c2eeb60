"""A row: packed documents as tensors, the input of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from training.tree.documents import Branch, Document

ROW_MULTIPLE = 128  # FlexAttention's backward needs lengths that are multiples of its block
NONE = -1  # no document (padding), no branch (trunk)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens of documents one after another, each document's trunk before its branches, then padding.

    All tensors are [num_tokens] unless they say otherwise, int64.
    """

    tokens: torch.Tensor
    positions: torch.Tensor  # position ids; branches restart where they leave their trunk
    documents: torch.Tensor  # number in the row; NONE: padding
    branches: torch.Tensor  # index into `answers`; NONE: trunk or padding
    depths: torch.Tensor  # how many tokens of its trunk a token may see: its branch's position; in trunks all
    targets: torch.Tensor  # [num_targets] the tokens that are learned, ascending
    predictors: torch.Tensor  # [num_targets] the token whose logits predict the target: the one before it in its tree
    answers: tuple[Branch, ...]
    context_length: int  # one more than the largest position id

    @classmethod
    def of(cls, documents: Sequence[Document], multiple: int = ROW_MULTIPLE) -> Row:
        """The row of these documents, padded to a multiple of `multiple` tokens."""
        row = _RowState()
        for number, document in enumerate(documents):
            row.append(number, document)
        return row.finished(multiple)

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return self.tokens.shape[0]

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0]

    @property
    def target_tokens(self) -> torch.Tensor:
        """[num_targets]"""
        return self.tokens[self.targets]

    @property
    def target_branches(self) -> torch.Tensor:
        """[num_targets] index into `answers`."""
        return self.branches[self.targets]

    def to(self, device: torch.device | str) -> Row:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)


class _RowState:
    """Columns of a row while it grows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._documents: list[int] = []
        self._branches: list[int] = []
        self._depths: list[int] = []
        self._targets: list[int] = []
        self._predictors: list[int] = []
        self._answers: list[Branch] = []

    def append(self, number: int, document: Document) -> None:
        begin, length = len(self._tokens), len(document.trunk)
        self._append(number, NONE, document.trunk, 0, length)
        for branch in document.branches:
            first = len(self._tokens)
            self._append(number, len(self._answers), branch.tokens, branch.position, branch.position)
            self._targets += range(first, first + len(branch.tokens))
            self._predictors += [begin + branch.position - 1, *range(first, first + len(branch.tokens) - 1)]
            self._answers.append(branch)

    def _append(self, document: int, branch: int, tokens: Sequence[int], first_position: int, depth: int) -> None:
        count = len(tokens)
        self._tokens += tokens
        self._positions += range(first_position, first_position + count)
        self._documents += [document] * count
        self._branches += [branch] * count
        self._depths += [depth] * count

    def finished(self, multiple: int) -> Row:
        context_length = max(self._positions, default=-1) + 1
        padding = -len(self._tokens) % multiple
        self._append(NONE, NONE, [0] * padding, 0, padding)
        return Row(
            tokens=torch.tensor(self._tokens),
            positions=torch.tensor(self._positions),
            documents=torch.tensor(self._documents),
            branches=torch.tensor(self._branches),
            depths=torch.tensor(self._depths),
            targets=torch.tensor(self._targets, dtype=torch.int64),
            predictors=torch.tensor(self._predictors, dtype=torch.int64),
            answers=tuple(self._answers),
            context_length=context_length,
        )
