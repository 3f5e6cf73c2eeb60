"""Pack documents into rows: first fit, longest first."""

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
    rows: list[list[Document]] = []
    free: list[int] = []
    for document in sorted(documents, key=lambda each: -each.num_tokens):  # equal ones keep their order
        size = document.num_tokens
        if size > row_tokens:
            raise DocumentInvalid(
                f"example {document.examples[0]} has {size} tokens with its answers, more than a row of {row_tokens}; "
                "shorten it or train with longer rows"
            )
        number = next((number for number, left in enumerate(free) if left >= size), len(rows))
        if number == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[number].append(document)
        free[number] -= size
    return [Row.of(row, multiple) for row in rows]
