"""The prompts of rows as clients send them to a server, and the token ids that training uses for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from training.data.columns import TextTurn, sft_row
from training.data.examples import Examples
from training.data.jsonl import read_rows
from training.data.tokens import Turn


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a row, with the answer that is wanted."""

    where: str  # file and row
    path: str  # of the HTTP API
    fields: dict[str, Any]  # of the request
    turn: Turn


def prompts_of(files: Sequence[Path], loaded: Examples) -> Iterator[Prompt]:
    """A prompt for each turn of rows that `load_sft` has read from the files, none of them left out.

    Texts go to the completions endpoint, conversations to the chat endpoint, which renders them itself.
    """
    rows = islice(read_rows(files), len(loaded))
    for row, example in zip(rows, loaded.examples, strict=True):
        columns = sft_row(row.fields())
        if isinstance(columns, TextTurn):
            yield Prompt(example.where, "/v1/completions", {"prompt": columns.prompt}, example.turns[0])
            continue
        shared: dict[str, Any] = {}
        if columns.tools is not None:
            shared["tools"] = columns.tools
        if columns.template_arguments:
            shared["chat_template_kwargs"] = columns.template_arguments
        for chat, turn in zip(columns.turns, example.turns, strict=True):
            fields = {"messages": list(chat.context), **shared}
            yield Prompt(example.where, "/v1/chat/completions", fields, turn)
