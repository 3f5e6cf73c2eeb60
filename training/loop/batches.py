"""Turns examples into rows. Contexts that are equal, or prefixes of each other, are read once."""

from collections.abc import Sequence

from training.data.examples import Example
from training.errors import DataInvalid, DocumentInvalid
from training.tree.documents import merge
from training.tree.packing import pack
from training.tree.rows import ROW_MULTIPLE, Row

_SHOWN = 4  # examples


class Batches:
    """The rows of any choice of examples. Raises DataInvalid for an example longer than a row."""

    def __init__(self, examples: Sequence[Example], row_tokens: int, *, fixed_rows: bool) -> None:
        self._examples, self._row_tokens = examples, row_tokens
        self._multiple = row_tokens if fixed_rows else ROW_MULTIPLE
        faults = []
        for number, example in enumerate(examples):
            longest = max(each.num_tokens for each in example.documents(number))
            if longest > row_tokens:
                faults.append(
                    f"{example.where}: over-long: prompt and answers have {longest} tokens, a row has {row_tokens}"
                )
        if faults:
            raise DataInvalid(faults, len(examples))

    def __len__(self) -> int:
        return len(self._examples)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these examples. Raises DocumentInvalid for what packing cannot do."""
        documents = [document for number in numbers for document in self._examples[number].documents(number)]
        try:
            return pack(merge(documents, self._row_tokens), self._row_tokens, self._multiple)
        except DocumentInvalid as error:
            where = self._examples[numbers[0]].where
            raise DocumentInvalid(f"the batch that begins with {where}: {error}") from error

    def named(self, rows: Sequence[Row]) -> str:
        """File and row of the examples whose answers are in these rows, the first ones of many."""
        numbers = sorted({branch.example for row in rows for branch in row.answers})
        shown = [self._examples[number].where for number in numbers[:_SHOWN]]
        more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
        return "; ".join(shown) + more
