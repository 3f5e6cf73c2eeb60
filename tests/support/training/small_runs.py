"""Small training runs, also as processes of their own that tests kill."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.model.normal_form import Positions
from training.loop.options import LoopOptions
from training.losses import Dpo, Objective, Sft
from training.runs.run import RunOptions
from training.trainable.spec import AdapterSpec, Kind

WORDS = ("sea", "boats", "bread", "music", "rivers", "winter", "gardens", "letters", "lamps", "bridge", "road", "ships")


def make_model(folder: Path, hidden: int = 32) -> Path:
    """A model directory with random weights, a tokenizer and a chat template."""
    from cluster.local import demo

    demo.make_model(folder, hidden=hidden, num_layers=2)
    return folder


def sft_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """The answer is the prompt's last word, twice; every third row is a conversation of two turns."""
    rows: list[dict[str, Any]] = []
    for number in range(first, first + count):
        one, two = WORDS[number % len(WORDS)], WORDS[(number * 5 + 1) % len(WORDS)]
        question, answer = f"{two} and {one}", f"{one} {one}"
        if number % 3:
            rows.append({"prompt": [_by("user", question)], "completion": [_by("assistant", answer)]})
        else:
            turns = [
                _by("user", question),
                _by("assistant", answer),
                _by("user", two),
                _by("assistant", f"{two} {two}"),
            ]
            rows.append({"messages": turns})
    return rows


def preference_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{one} and {two}", "chosen": f" {two}", "rejected": f" {one} and {one}"}
        for one, two in ((WORDS[n % len(WORDS)], WORDS[(n * 7 + 3) % len(WORDS)]) for n in range(count))
    ]


def _by(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """A text is a line as it is."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def options(
    model: Path,
    data: Path,
    output: Path,
    *,
    kind: Kind = "lora",
    positions: Positions = "prefill",
    objective: Objective | None = None,
    held_out: Path | None = None,
    resume: bool = False,
    learning_rate: float = 0.02,
    **loop: Any,
) -> RunOptions:
    """A run of twelve steps, unless `loop` has something else."""
    defaults = {"max_steps": 12, "batch_size": 4, "row_tokens": 256, "log_every": 1, "eval_every": 4, "save_every": 2}
    return RunOptions(
        model=model,
        data=[data],
        output=output,
        adapter=AdapterSpec(kind, rank=4, positions=positions),
        objective=objective or Sft(),
        loop=LoopOptions(learning_rate=learning_rate, **defaults | loop),
        held_out=[] if held_out is None else [held_out],
        resume=resume,
    )


def killable_run(model: Path, data: Path, held_out: Path, output: Path, kind: Kind, is_preference: bool) -> None:
    """Train to the end from wherever the folder's run is. For a process of its own."""
    import torch

    from training.runs.run import run

    torch.set_num_threads(1)
    chosen = Dpo() if is_preference else Sft()
    run(options(model, data, output, kind=kind, objective=chosen, held_out=held_out, resume=True, log_every=3))
