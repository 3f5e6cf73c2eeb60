"""One training and the answers of the arms that use it, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from adapters.formats import read_adapter
from adapters.model.normal_form import Adapter, Positions
from adapters.verification.reference import UNLIMITED
from bench.positions.grid import (
    AS_PREFILL,
    CONVERSION_STEPS,
    CONVERTED,
    LONGER,
    MAIN_RANK,
    MAX_TOKENS,
    PREFILL_LONGER,
    RATE_SEED,
    Cell,
    Job,
    Options,
    Trial,
    task_of,
)
from bench.positions.tasks import Question
from training.conversion.convert import ConversionOptions, convert
from training.data.examples import Example, load_sft
from training.data.tokens import Encoder
from training.errors import LossNotFinite
from training.loop.batches import Batches
from training.loop.objectives import Sft
from training.loop.options import LoopOptions
from training.loop.training import evaluate
from training.runs import answers
from training.runs.base import LoadedBase
from training.runs.evaluation import shown_text
from training.runs.run import RunOptions, prepared
from training.trainable.spec import AdapterSpec

_ROW_TOKENS = 4096
_CONVERTED_ROW_TOKENS = (2048, 8192)  # these rows are padded in bfloat16: of short and of long answers
_LONG = 100  # tokens of an answer
_ANSWER_ROOM = 1.25, 16  # times and plus the longest right answer: an answer that does not end costs no more

_LOST = 1e9  # the loss of a training that failed

# Of this process:
_device = "cpu"
_files: str | None = None


def begin(device: str, numbers: Any, num_threads: int, files: str) -> None:
    """The process's first deed: GPUs are taken in turn."""
    global _device, _files
    _files = files
    torch.set_num_threads(num_threads)
    _device = f"cuda:{numbers.get() % torch.cuda.device_count()}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(_device)


def try_rate(trial: Trial, options: Options) -> list[dict[str, Any]]:
    """The validation loss after training."""
    cell = Cell(trial.task, trial.kind, MAIN_RANK if MAIN_RANK in options.ranks else options.ranks[0], RATE_SEED)
    with _folder(cell, options) as (folder, validation, _):
        run_options = _run_options(cell, options, folder, trial.positions, trial.learning_rate, 1)
        try:
            with prepared(run_options) as ready:
                ready.training.run()
                asked = _examples(folder, validation, ready.base)
                loss = evaluate(ready.model, Sft(), Batches(asked, trial.positions, _ROW_TOKENS, fixed_rows=False))[
                    "loss"
                ]
        except LossNotFinite:
            loss = _LOST
    return [{**asdict(trial), "loss": loss}]


def run_job(job: Job, options: Options) -> list[dict[str, Any]]:
    """A row for each arm."""
    cell = job.cell
    factor = LONGER if PREFILL_LONGER in job.arms else 1
    rate = options.learning_rate or job.rates[job.positions]
    with _folder(cell, options) as (folder, _, held_out):
        begun = time.monotonic()
        with prepared(_run_options(cell, options, folder, job.positions, rate, factor)) as ready:
            num_parameters = ready.num_parameters
            ready.training.run()
            ready.model.detach()
            base = ready.base
        seconds = time.monotonic() - begun
        trained = _read(folder / "run" / "last", base)
        rows = []
        for arm in job.arms:
            begun = time.monotonic()
            facts: dict[str, Any] = {"steps": factor * options.num_steps, "seconds": round(seconds, 2)}
            used = trained
            if arm == AS_PREFILL:
                used = replace(trained, positions="prefill")
            if arm == CONVERTED:
                used, more = _convert(job, options, folder, base, trained)
                facts |= more | {"seconds": round(seconds + time.monotonic() - begun, 2)}
            begun = time.monotonic()
            figures = _figures(cell, _examples(folder, held_out, base), held_out, used, base)
            facts["answer_seconds"] = round(time.monotonic() - begun, 2)
            rows.append(
                {
                    **asdict(cell),
                    "arm": arm,
                    "learning_rate": rate,
                    "num_parameters": num_parameters,
                    **figures,
                    **facts,
                }
            )
    if base.model.device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes beside
    return rows


@contextlib.contextmanager
def _folder(cell: Cell, options: Options) -> Iterator[tuple[Path, Sequence[Question], Sequence[Question]]]:
    """A folder with train.jsonl; the task's questions for validation, and those held out."""
    train, validation, held_out = task_of(cell.task).rows(cell.seed)
    if options.rows is not None:
        train, validation, held_out = (each[: options.rows] for each in (train, validation, held_out))
    with tempfile.TemporaryDirectory(dir=_files) as name:
        folder = Path(name)
        _write(folder / "train.jsonl", train)
        yield folder, validation, held_out


def _write(path: Path, questions: Sequence[Question]) -> None:
    rows = (
        {
            "prompt": [{"role": "user", "content": each.asked}],
            "completion": [{"role": "assistant", "content": each.answer}],
        }
        for each in questions
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _run_options(
    cell: Cell, options: Options, folder: Path, positions: Positions, rate: float, factor: int
) -> RunOptions:
    num_steps = factor * options.num_steps
    return RunOptions(
        model=options.model,
        data=[folder / "train.jsonl"],
        output=folder / "run",
        adapter=AdapterSpec(cell.kind, cell.rank, positions=positions),
        objective=Sft(),
        loop=LoopOptions(
            rate,
            max_steps=num_steps,
            batch_size=options.batch_size,
            row_tokens=_ROW_TOKENS,
            warmup_ratio=0.1,
            seed=cell.seed,
            save_every=num_steps,
        ),
        max_tokens=MAX_TOKENS,
        dtype=options.dtype,
        device=_device,
    )


def _examples(folder: Path, questions: Sequence[Question], base: LoadedBase) -> Sequence[Example]:
    _write(folder / "asked.jsonl", questions)
    return load_sft([folder / "asked.jsonl"], Encoder(base.tokenizer, base.ends), MAX_TOKENS).examples


def _read(directory: Path, base: LoadedBase) -> Adapter:
    return read_adapter(directory, base.sizes, UNLIMITED)


def _figures(
    cell: Cell, examples: Sequence[Example], questions: Sequence[Question], adapter: Adapter, base: LoadedBase
) -> dict[str, Any]:
    """How many answers are right, how near the others are, how long they all are."""
    turns = [example.turns[0] for example in examples]
    longest = max(len(turn.answers[0]) for turn in turns)
    most = _most_tokens(longest)
    ends = base.ends | {base.tokenizer.eos_token_id}
    asked = [answers.Question(turn.context, most, turn.answers[0]) for turn in turns]
    exact, near, lengths, losses, endless = [], [], [], [], 0
    nearness = task_of(cell.task).nearness
    for number, given in answers.answers(base.model, adapter, asked, ends):
        text, right = shown_text(base.tokenizer, given.tokens, ends), questions[number].answer
        has_ended = given.tokens[-1] in ends
        endless += not has_ended
        exact.append(float(has_ended and text == right))
        near.append(nearness(text, right))
        lengths.append(len(given.tokens))
        losses.append(given.loss)
    num_right = sum(len(turn.answers[0]) for turn in turns)
    return {
        "exact": round(statistics.fmean(exact), 4),
        "near": round(statistics.fmean(near), 4),
        "loss": round(math.fsum(losses) / num_right, 4),  # of the right answers, per token
        "answer_tokens": round(statistics.fmean(lengths), 2),
        "right_tokens": round(num_right / len(turns), 2),
        "endless": round(endless / len(turns), 4),  # part of the answers
        "num_rows": len(turns),
    }


def _convert(
    job: Job, options: Options, folder: Path, base: LoadedBase, teacher: Adapter
) -> tuple[Adapter, dict[str, Any]]:
    """The student, of the teacher's kind and begun from its weights, and what it took.

    It learns from the prompts of the training rows, not from their answers.
    """
    prompts = load_sft([folder / "train.jsonl"], Encoder(base.tokenizer, base.ends), MAX_TOKENS)
    longest = max(len(turn.answers[0]) for each in prompts.examples for turn in each.turns)
    chosen = ConversionOptions(
        kind="lora" if job.cell.kind == "lora" else "direft",
        num_steps=CONVERSION_STEPS * options.num_steps,
        batch_size=options.batch_size,
        answer_tokens=_most_tokens(longest),
        row_tokens=_CONVERTED_ROW_TOKENS[longest > _LONG],
        seed=job.cell.seed,
    )
    converted = convert(base, teacher, prompts, chosen)
    report = converted.report
    return converted.adapter.normal_form(), {
        "steps": options.num_steps + report.num_steps,
        "num_parameters": sum(each.numel() for each in converted.adapter.parameters()),
        "agreement": round(report.after.agreement, 4),  # with the teacher, of prompts held out of the training rows
        "agreement_before": round(report.before.agreement, 4),
    }


def _most_tokens(longest: int) -> int:
    """Of an answer, by the longest right one."""
    return int(_ANSWER_ROOM[0] * longest) + _ANSWER_ROOM[1]
