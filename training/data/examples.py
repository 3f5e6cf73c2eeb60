"""Loads whole files: every row is encoded and checked before training begins, and all faults are reported at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.columns import Conversation, TextTurn
from training.data.jsonl import RowFault, read_rows
from training.data.tokens import Encoder, Turn
from training.errors import DataInvalid
from training.tree.documents import Branch, Document

_UNLIMITED = 1 << 40
ReadColumns = Callable[[Mapping[str, Any]], TextTurn | Conversation]


@dataclass(frozen=True, slots=True)
class Example:
    """One row: its trained turns, in order."""

    where: str  # file and row
    turns: tuple[Turn, ...]

    def documents(self, number: int) -> Iterator[Document]:
        """A document for each turn, whose branches say that they come from row `number` of the data."""
        for turn in self.turns:
            position = len(turn.context)
            branches = (
                Branch(position, tuple(answer), number, is_chosen=place == 0)
                for place, answer in enumerate(turn.answers)
            )
            yield Document(tuple(turn.context), tuple(branches))


@dataclass(frozen=True, slots=True)
class Examples:
    """The rows of some files."""

    examples: tuple[Example, ...]
    num_too_long: int  # rows that were left out

    def __len__(self) -> int:
        return len(self.examples)


class RowTooLong(RowFault):
    """A turn of the row has more tokens than are trained."""


def _turns(encoder: Encoder, row: TextTurn | Conversation, max_tokens: int) -> Iterator[Turn]:
    """The row's turns. Ends at the first that is too long, so that a conversation without end costs no more."""
    for turn in encoder.turns(row):
        longest = len(turn.context) + max(map(len, turn.answers), default=0)
        if longest > max_tokens:
            raise RowTooLong(f"over-long: prompt and answer have {longest} tokens, at most {max_tokens} are trained")
        yield turn.compact()


def load(
    files: Sequence[Path],
    encoder: Encoder,
    read: ReadColumns,
    max_tokens: int = _UNLIMITED,
    *,
    leave_out_long: bool = False,
    num_rows: int | None = None,
) -> Examples:
    """The first `num_rows` rows (None: all), by `sft_row`, `preference_row` or `prompt_row`.

    A turn, context and longest answer, has at most `max_tokens` ids. Raises DataInvalid with every fault, and
    OptionInvalid for a file that cannot be read.
    """
    examples, faults, num_long, count = [], [], 0, 0
    for row in read_rows(files):
        if num_rows is not None and count == num_rows:
            break
        count += 1
        try:
            examples.append(Example(row.where, tuple(_turns(encoder, read(row.fields()), max_tokens))))
        except RowTooLong as fault:
            if leave_out_long:
                num_long += 1
            else:
                faults.append(f"{row.where}: {fault}")
        except RowFault as fault:
            faults.append(f"{row.where}: {fault}")
    named = ", ".join(map(str, files))
    if faults:
        raise DataInvalid(faults, count)
    if not examples:
        left_out = f"; {num_long} were left out as over-long" if num_long else ""
        raise DataInvalid([f"{named}: there is no row to train on{left_out}"], 0)
    return Examples(tuple(examples), num_long)
