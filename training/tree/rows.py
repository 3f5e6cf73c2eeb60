"""A row: packed documents as tensors, the input of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from adapters.model.normal_form import Positions
from training.tree.documents import Branch, Document

ROW_MULTIPLE = 128  # FlexAttention's backward needs lengths that are multiples of its block
NONE = -1  # no document (padding), no branch (trunk), no slot (not adapted)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens of documents one after another, each document's trunk before its branches, then padding.

    All tensors are [num_tokens] unless they say otherwise; int64 but for `target_mask`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor  # position ids; branches restart where they leave their trunk
    documents: torch.Tensor  # number in the row; NONE: padding
    branches: torch.Tensor  # index into `answers`; NONE: trunk or padding
    depths: torch.Tensor  # how many tokens of its trunk a token may see: its branch's position; in trunks all
    slots: torch.Tensor  # of the adapter that is applied to the token; NONE: base weights only
    target_mask: torch.Tensor  # bool: the token is learned
    targets: torch.Tensor  # [num_targets] where target_mask is set, ascending
    predictors: torch.Tensor  # [num_targets] the token whose logits predict the target: the one before it in its tree
    adapted: torch.Tensor  # [num_adapted] where slots has one, sorted by slot, then by place
    num_adapted: tuple[int, ...]  # tokens of each slot, in the same order
    answers: tuple[Branch, ...]
    applied: frozenset[tuple[int, Positions]]  # slots of its documents, and where they are applied
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

    def without_slots(self) -> Row:
        """The same row without any adapter: what the base model makes of it."""
        nothing = torch.full_like(self.slots, NONE)
        return replace(self, slots=nothing, adapted=self.adapted[:0], num_adapted=(), applied=frozenset())

    def to(self, device: torch.device | str) -> Row:
        tensors = {name: value.to(device) for name, value in self._tensors().items()}
        return replace(self, **tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


class _RowState:
    """Columns of a row while it grows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._documents: list[int] = []
        self._branches: list[int] = []
        self._depths: list[int] = []
        self._slots: list[int] = []
        self._targets: list[int] = []
        self._predictors: list[int] = []
        self._answers: list[Branch] = []
        self._applied: set[tuple[int, Positions]] = set()

    def append(self, number: int, document: Document) -> None:
        begin, length = len(self._tokens), len(document.trunk)
        self._append(number, NONE, document.trunk, 0, length, document.slot)
        self._applied.add((document.slot, document.positions))
        slot = document.slot if document.positions == "all" else NONE
        for branch in document.branches:
            first = len(self._tokens)
            self._append(number, len(self._answers), branch.tokens, branch.position, branch.position, slot)
            self._targets += range(first, first + len(branch.tokens))
            self._predictors += [begin + branch.position - 1, *range(first, first + len(branch.tokens) - 1)]
            self._answers.append(branch)

    def _append(
        self, document: int, branch: int, tokens: Sequence[int], first_position: int, depth: int, slot: int
    ) -> None:
        count = len(tokens)
        self._tokens += tokens
        self._positions += range(first_position, first_position + count)
        self._documents += [document] * count
        self._branches += [branch] * count
        self._depths += [depth] * count
        self._slots += [slot] * count

    def finished(self, multiple: int) -> Row:
        context_length = max(self._positions, default=-1) + 1
        padding = -len(self._tokens) % multiple
        self._append(NONE, NONE, [0] * padding, 0, padding, NONE)
        slots = torch.tensor(self._slots)
        order = torch.argsort(slots, stable=True)
        counts = torch.bincount(slots[slots != NONE]).tolist()
        targets, target_mask = torch.tensor(self._targets, dtype=torch.int64), torch.zeros(len(slots), dtype=torch.bool)
        target_mask[targets] = True
        return Row(
            tokens=torch.tensor(self._tokens),
            positions=torch.tensor(self._positions),
            documents=torch.tensor(self._documents),
            branches=torch.tensor(self._branches),
            depths=torch.tensor(self._depths),
            slots=slots,
            target_mask=target_mask,
            targets=targets,
            predictors=torch.tensor(self._predictors, dtype=torch.int64),
            adapted=order[len(slots) - sum(counts) :],
            num_adapted=tuple(counts),
            answers=tuple(self._answers),
            applied=frozenset(self._applied),
            context_length=context_length,
        )
