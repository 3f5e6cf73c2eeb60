"""Pack documents into rows: first fit, longest first."""

from __future__ import annotations

from collections.abc import Sequence

from training.errors import DocumentInvalid
from training.tree.documents import Document
from training.tree.rows import ROW_MULTIPLE, Row


def pack(documents: Sequence[Document], row_tokens: int, multiple: int = ROW_MULTIPLE) -> list[Row]:
    """Rows of at most `row_tokens` tokens that hold all documents, each whole.

    Each row is padded to a multiple of `multiple`; with `row_tokens` itself all rows have one length, for kernels whose
    rounding depends on it. Raises DocumentInvalid for a document longer than a row.
    """
    if row_tokens < 1 or row_tokens % ROW_MULTIPLE or row_tokens % multiple:
        raise ValueError(f"rows of {row_tokens} tokens; their length must be a multiple of {ROW_MULTIPLE}")
    return [
        Row.of([documents[number] for number in row], multiple)
        for row in assign([document.num_tokens for document in documents], row_tokens, documents)
    ]


def assign(sizes: Sequence[int], row_tokens: int, documents: Sequence[Document] | None = None) -> list[list[int]]:
    """Numbers of the sizes that share a row, by first fit decreasing; the rows are at most 11/9 of the fewest, plus 1.

    Equal sizes keep their order. Takes O(log(rows)) for each size.
    """
    for number, size in enumerate(sizes):
        if size > row_tokens:
            named = f"example {documents[number].examples[0]}" if documents else f"document {number}"
            raise DocumentInvalid(
                f"{named} has {size} tokens with its answers, more than a row of {row_tokens}; shorten it or train "
                "with longer rows"
            )
    rows: list[list[int]] = []
    free = _FreeTokens(len(sizes), row_tokens)
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        row = free.take(sizes[number])
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
    return rows


class _FreeTokens:
    """A binary tree over rows whose nodes hold the most free tokens of any row below them."""

    def __init__(self, num_rows: int, row_tokens: int):
        self._num_leaves = 1 << max(num_rows - 1, 0).bit_length()
        self._most = [row_tokens] * (2 * self._num_leaves)

    def take(self, size: int) -> int:
        """Take tokens of the first row that has so many."""
        node = 1
        while node < self._num_leaves:
            node *= 2
            if self._most[node] < size:
                node += 1
        row = node - self._num_leaves
        self._most[node] -= size
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
        return row
