"""A small model that a prompt can steer, and an adapter that loses what it has learned if it acts on the prompt only.

The base model answers " the W and V" to a prompt whose last word is W, V being the word after W in a list. The adapter
answers with the next pair of the list. It changes the last layer only, so that it leaves nothing in a prompt's KV.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.training.small_runs import WORDS, make_model, options, write_jsonl

from training.data.columns import sft_row
from training.data.examples import load
from training.data.tokens import Encoder
from training.runs.base import load_base
from training.runs.run import run
from training.trainable.spec import AdapterSpec

_PROMPTS = range(144)
_BASE_STEPS, _TEACHER_STEPS = 80, 60


@dataclass(frozen=True)
class Steerable:
    model: Path
    teacher: Path  # an adapter for all positions
    rows: Path  # prompts with the teacher's answers
    without_answers: Path  # the prompts alone


def steerable_rows(shift: int = 1) -> list[dict[str, Any]]:
    """With the adapter's answers; with a shift of 0 the base model's."""
    found = []
    for number in _PROMPTS:
        one, two, three = (number // step % len(WORDS) for step in (1, 12, 5))
        first, second = (WORDS[(one + shift + further) % len(WORDS)] for further in (0, 1))
        prompt = f"{WORDS[three]} {WORDS[two]} and {WORDS[one]}"
        found.append({"prompt": prompt, "completion": f" the {first} and {second}"})
    return found


def make_steerable(folder: Path) -> Steerable:
    """Train both."""
    torch.set_num_threads(1)
    model = make_model(folder / "model", hidden=64)
    _train_base(model, write_jsonl(folder / "base.jsonl", steerable_rows(0)))
    rows = write_jsonl(folder / "rows.jsonl", steerable_rows())
    chosen = options(
        model, rows, folder / "run", batch_size=16, row_tokens=512, max_steps=_TEACHER_STEPS, save_every=60
    )
    modules = ("gate_proj", "up_proj", "down_proj")
    run(replace(chosen, adapter=AdapterSpec("lora", 8, positions="all", modules=modules, layers=(1,))))
    prompts = [{"prompt": each["prompt"]} for each in steerable_rows()]
    return Steerable(model, folder / "run" / "last", rows, write_jsonl(folder / "prompts.jsonl", prompts))


def _train_base(folder: Path, data: Path) -> None:
    base = load_base(folder, "float32", "cpu")
    turns = [each.turns[0] for each in load([data], Encoder(base.tokenizer, base.ends), sft_row, 64).examples]
    longest = max(len(turn.context) + len(turn.answers[0]) for turn in turns)
    ids = torch.zeros(len(turns), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for number, turn in enumerate(turns):
        whole = torch.tensor([*turn.context, *turn.answers[0]])
        ids[number, : len(whole)] = whole
        labels[number, len(turn.context) : len(whole)] = whole[len(turn.context) :]
    optimiser = torch.optim.AdamW(base.model.parameters(), lr=0.003)
    for _ in range(_BASE_STEPS):
        base.model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    base.model.save_pretrained(folder)
