"""Trains the demo's adapters, and counts what they and the base model get right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adapters.model.normal_form import Positions
from training.adapted_model import AdaptedModel, attach
from training.data.columns import sft_row
from training.data.examples import Example, load
from training.data.tokens import Encoder
from training.loop.options import LoopOptions
from training.losses import Sft
from training.runs.base import LoadedBase, load_base
from training.runs.run import RunOptions, prepared
from training.trainable.spec import AdapterSpec, Kind
from training.tree.packing import pack

_ROW_TOKENS = 1024
_MAX_TOKENS = 512  # of a conversation


@dataclass(frozen=True, slots=True)
class DemoAdapter:
    """An adapter that has the base model answer in one style, without its control word."""

    name: str
    style: str
    kind: Kind
    learning_rate: float
    rank: int = 8
    positions: Positions = "prefill"
    num_steps: int = 60
    batch_size: int = 16

    @property
    def num_rows(self) -> int:
        """That are trained, once each."""
        return self.num_steps * self.batch_size


def train_adapter(adapter: DemoAdapter, base: Path, data: Path, held_out: Path, output: Path) -> float:
    """Train on a file's rows, as `prelude train sft` does. Returns the part of the held-out answers that are exact.

    The adapter is in `output`/last.
    """
    options = RunOptions(
        model=base,
        data=[data],
        output=output,
        adapter=AdapterSpec(adapter.kind, adapter.rank, positions=adapter.positions),
        objective=Sft(),
        loop=LoopOptions(
            adapter.learning_rate,
            max_steps=adapter.num_steps,
            batch_size=adapter.batch_size,
            row_tokens=_ROW_TOKENS,
            warmup_ratio=0.1,
            save_every=adapter.num_steps,
        ),
        max_tokens=_MAX_TOKENS,
    )
    with prepared(options) as ready:
        ready.training.run()
        return exact_match(ready.model, _examples(held_out, ready.base), adapter.positions)


def base_exact_match(base: Path, files: Sequence[Path]) -> list[float]:
    """Of the base model alone, for each file of rows."""
    loaded = load_base(base, "float32", "cpu")
    model = attach(loaded.model, [])
    return [exact_match(model, _examples(file, loaded), None) for file in files]


def exact_match(model: AdaptedModel, examples: Sequence[Example], positions: Positions | None) -> float:
    """The part of the answers that greedy decoding would give, token for token.

    By slot 0, whose adapter is for these positions; None: by the base model.
    """
    documents = [
        each for number, example in enumerate(examples) for each in example.documents(number, positions or "prefill")
    ]
    num_exact = 0
    with torch.no_grad():
        for row in pack(documents, _ROW_TOKENS):
            read = row.without_slots() if positions is None else row
            num_exact += int(model.score(read).exact_answers(read).sum())
    return num_exact / len(documents)


def _examples(file: Path, base: LoadedBase) -> Sequence[Example]:
    return load([file], Encoder(base.tokenizer, base.ends), sft_row, _MAX_TOKENS).examples
