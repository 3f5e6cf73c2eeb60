"""How pairs become rows: packed with shared prompts, packed with a prompt for each answer, or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.training.profiles import Pair
from training.tree.documents import Branch, Document
from training.tree.packing import assign
from training.tree.rows import NONE, Row


@dataclass(frozen=True, slots=True)
class FilledRow:
    """A row with the whole pairs (or single answers, for SFT) that it holds."""

    row: Row
    num_examples: int
    num_sequences: int = 1  # of equal length, one after another in the row: a padded batch

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int((self.row.documents != NONE).sum())


def shared(pairs: Sequence[Pair], row_tokens: int) -> list[FilledRow]:
    """One document for each pair, whose prompt is read once."""
    return _packed(
        [[_document(pair.prompt, (pair.chosen, pair.rejected), n)] for n, pair in enumerate(pairs)], row_tokens
    )


def paired(pairs: Sequence[Pair], row_tokens: int) -> list[FilledRow]:
    """Two documents for each pair, in one row, each with the prompt."""
    return _packed([_both(pair, number) for number, pair in enumerate(pairs)], row_tokens)


def answers(pairs: Sequence[Pair], row_tokens: int) -> list[FilledRow]:
    """The chosen answers only, for SFT."""
    return _packed([_both(pair, number)[:1] for number, pair in enumerate(pairs)], row_tokens)


def padded(pairs: Sequence[Pair], row_tokens: int) -> list[FilledRow]:
    """Batches as trl pads them by default: both answers of some pairs, each padded to the longest of the batch.

    A batch has as many pairs as fit in `row_tokens` tokens, padding included, in the order of the data.
    """
    batches: list[list[Document]] = []
    for number, pair in enumerate(pairs):
        both = _both(pair, number)
        longest = max(document.num_tokens for document in [*(batches[-1] if batches else []), *both])
        if batches and (len(batches[-1]) + 2) * longest <= row_tokens:
            batches[-1] += both
        else:
            batches.append(both)
    return [_batch(batch) for batch in batches]


def tokens_per_example(layout: str, pairs: Sequence[Pair]) -> float:
    """Mean tokens of a pair, or of one answer for SFT, without padding."""
    prompts, chosen, rejected = (
        sum(len(getattr(pair, name)) for pair in pairs) / len(pairs) for name in ("prompt", "chosen", "rejected")
    )
    if layout.startswith("sft"):
        return prompts + chosen
    return (prompts if layout == "shared" else 2 * prompts) + chosen + rejected


def _both(pair: Pair, number: int) -> list[Document]:
    chosen, rejected = (_document(pair.prompt, (answer,), number) for answer in (pair.chosen, pair.rejected))
    return [chosen, replace(rejected, branches=(replace(rejected.branches[0], is_chosen=False),))]


def _document(prompt: tuple[int, ...], several: Sequence[tuple[int, ...]], number: int) -> Document:
    branches = (Branch(len(prompt), answer, number, is_chosen=place == 0) for place, answer in enumerate(several))
    return Document(prompt, tuple(branches))


def _packed(groups: Sequence[list[Document]], row_tokens: int) -> list[FilledRow]:
    """Rows of `row_tokens`, fullest first; the documents of a group stay together."""
    sizes = [sum(document.num_tokens for document in group) for group in groups]
    rows = [
        FilledRow(Row.of([document for number in numbers for document in groups[number]], row_tokens), len(numbers))
        for numbers in assign(sizes, row_tokens)
    ]
    return sorted(rows, key=lambda each: -each.num_tokens)


def _batch(documents: Sequence[Document]) -> FilledRow:
    longest = max(document.num_tokens for document in documents)
    parts = [Row.of([document], longest) for document in documents]
    row = parts[0]
    for part in parts[1:]:
        row = _joined(row, part)
    return FilledRow(row, len(documents) // 2, len(documents))


def _joined(row: Row, part: Row) -> Row:
    """Both, one after the other. Of one slot each."""
    offset, (slot, other) = row.num_tokens, (row.num_adapted, part.num_adapted)
    assert len(slot) == len(other) == 1
    branches = torch.where(part.branches == NONE, NONE, part.branches + len(row.answers))
    documents = torch.where(part.documents == NONE, NONE, part.documents + int(row.documents.max()) + 1)
    later = {
        "branches": branches,
        "documents": documents,
        **{name: getattr(part, name) + offset for name in ("targets", "predictors", "adapted")},
        **{name: getattr(part, name) for name in ("tokens", "positions", "depths", "slots", "target_mask")},
    }
    return replace(
        row,
        **{name: torch.cat([getattr(row, name), value]) for name, value in later.items()},
        num_adapted=(slot[0] + other[0],),
        answers=row.answers + part.answers,
        context_length=max(row.context_length, part.context_length),
    )
