"""Does the best learning rate stay the same from rank 1 to 32? With the scales that training uses, and without.

A small model is pretrained on sequences "control, letters, end, answer", in which one of eight control tokens says by
how much the answer's letters are shifted. In half of the sequences a topic stands in place of the control token, and
the shift is random. Then prefill-only adapters of every kind and rank are trained on sequences with topics, so that
they choose one shift without its control token, and their loss on held-out sequences is compared over learning rates.

An adapter learns one behaviour, as those of the demo do. A shift for each topic is no task for all kinds: LoRA learns
such a table, but ReFT does not, at any of the rates.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from adapters.model.base_model import BaseModel
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_text
from training.adapted_model import AdaptedModel, attach
from training.errors import LossNotFinite
from training.losses import sft
from training.optimisation.optimiser import AdamOptions, Optimiser
from training.optimisation.schedule import Schedule
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import KINDS, AdapterSpec, Kind
from training.tree.documents import Branch, Document
from training.tree.rows import Row

_LETTERS, _CHOICES, _LENGTH = 24, 8, 8
_CONTROL, _TOPIC = _LETTERS, _LETTERS + _CHOICES
_END = _LETTERS + 2 * _CHOICES
_VOCABULARY = 48
_SHIFTS = (0, 3, 5, 7, 11, 13, 17, 19)
_WANTED = 4  # of them
# Scales that ignore the rank: those of the rules at rank 16 (LoRA) and 1 (ReFT).
_FIXED_SCALES: dict[Kind, float] = {"lora": 2.0, "direft": 1.0, "loreft": 1.0}
_PRETRAINED_BELOW = 0.02  # nats per answer token, where there is a control token
_LEARNED_BELOW = 0.5  # of the loss without an adapter; otherwise the best learning rate says nothing


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    kinds: tuple[Kind, ...] = KINDS
    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    learning_rates: tuple[float, ...] = tuple(2.0**-n for n in range(11, 0, -1))
    num_steps: int = 60
    batch_size: int = 32
    seeds: int = 1
    pretraining_steps: int = 1500
    processes: int | None = None  # None: one for each core
    device: str = "cpu"  # for pretraining


QUICK = Options(kinds=("lora",), ranks=(1, 2), learning_rates=(0.001, 0.01), num_steps=3, pretraining_steps=3)


@dataclass(frozen=True, slots=True)
class Task:
    """One adapter to train."""

    kind: Kind
    rank: int
    learning_rate: float
    is_scaled: bool
    seed: int


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Pretrain, train every adapter, print the best learning rates, write the numbers."""
    begin = time.monotonic()
    require_folders(json_path)
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        pretrained = pretrain(options, Path(folder))
        pretrained["loss_without_adapter"] = loss_without_adapter(Path(folder))
        progress(f"pretrained in {time.monotonic() - begin:.0f} s: {pretrained}")
        tasks = [
            Task(kind, rank, rate, is_scaled, seed)
            for rate in options.learning_rates  # so that long and short runs are spread over the processes
            for kind in options.kinds
            for rank in options.ranks
            for is_scaled in (True, False)
            for seed in range(options.seeds)
        ]
        rows = sorted(_train_all(tasks, options, Path(folder)), key=lambda row: (row["kind"], row["rank"], row["seed"]))
    progress(f"{len(tasks)} adapters in {time.monotonic() - begin:.0f} s")
    document = {
        **provenance.head("rank-transfer", command, asdict(options), options.device),
        "pretrained": pretrained,
        "rows": rows,
        "best": best_rates(rows, pretrained["loss_without_adapter"]),
    }
    for line in document["best"]:
        progress(json.dumps(line))
    if json_path is not None:
        write_text(json.dumps(document) + "\n", json_path)
    return document


def pretrain(options: Options, folder: Path) -> dict[str, float]:
    """Write the base model into the folder; returns its losses with a control token and with a topic."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=384,
        vocab_size=_VOCABULARY,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(options.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    steps = options.pretraining_steps
    losses = torch.zeros(2)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / 100, 1.0, 0.05 + (steps - step) / steps)
        tokens, is_control = (each.to(options.device) for each in _pretraining_batch(256, generator))
        logits = model(input_ids=tokens[:, :-1]).logits[:, _LENGTH + 1 :]
        found = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, _LENGTH + 2 :].flatten(), reduction="none"
        )
        found = found.view(len(tokens), -1).mean(dim=1)
        found.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 50 == 49 or step == steps - 1:
            losses = torch.stack([found[is_control].mean(), found[~is_control].mean()]).detach().cpu()
            if losses[0] < _PRETRAINED_BELOW / 2:
                break
    model.config.architectures = [type(model).__name__]
    model.cpu().save_pretrained(folder)
    with_control, with_topic = (round(float(loss), 4) for loss in losses)
    return {"loss_with_control_token": with_control, "loss_with_topic": with_topic, "steps": step + 1}


def _pretraining_batch(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """([count, 18] tokens, [count] whether there is a control token)"""
    letters = torch.randint(_LETTERS, (count, _LENGTH), generator=generator)
    choice = torch.randint(_CHOICES, (count, 1), generator=generator)
    topic = torch.randint(_CHOICES, (count, 1), generator=generator)
    is_control = torch.rand(count, 1, generator=generator) < 0.5
    first = torch.where(is_control, _CONTROL + choice, _TOPIC + topic)
    answers = (letters + torch.tensor(_SHIFTS)[choice]) % _LETTERS
    end = torch.full((count, 1), _END)
    return torch.cat([first, letters, end, answers], dim=1), is_control.squeeze(1)


def topic_documents(count: int, seed: int) -> list[Document]:
    """Contexts with some topic, whose answers all have the shift that is to be learned."""
    generator = random.Random(seed)
    documents = []
    for number in range(count):
        topic = generator.randrange(_CHOICES)
        letters = [generator.randrange(_LETTERS) for _ in range(_LENGTH)]
        answer = tuple((letter + _SHIFTS[_WANTED]) % _LETTERS for letter in letters)
        context = (_TOPIC + topic, *letters, _END)
        documents.append(Document(context, (Branch(len(context), answer, number),)))
    return documents


def _train_all(tasks: Sequence[Task], options: Options, folder: Path) -> Iterator[dict[str, Any]]:
    processes = options.processes or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, context) as pool:
        running = [pool.submit(train, task, options.num_steps, options.batch_size, folder) for task in tasks]
        for each in as_completed(running):
            yield each.result()


@cache
def _base(folder: Path) -> tuple[Any, BaseModel]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), BaseModel.read(folder)


def train(task: Task, num_steps: int, batch_size: int, folder: Path) -> dict[str, Any]:
    """Train one adapter; `loss` is that of held-out sequences, None if it is not finite any more."""
    model, base = _base(folder)
    spec = AdapterSpec(task.kind, task.rank, fixed_scale=None if task.is_scaled else _FIXED_SCALES[task.kind])
    adapter = TrainableAdapter.create(spec, base, seed=task.seed)
    adapted = attach(model, [adapter])
    try:
        loss: float | None = _train_steps(adapted, adapter, task, num_steps, batch_size)
    except LossNotFinite:
        loss = None
    finally:
        adapted.detach()
    return {**asdict(task), "loss": None if loss is None or loss != loss else round(loss, 5)}


def _train_steps(
    adapted: AdaptedModel, adapter: TrainableAdapter, task: Task, num_steps: int, batch_size: int
) -> float:
    optimiser = Optimiser(dict(adapter.named_parameters()), AdamOptions())
    schedule = Schedule(task.learning_rate, num_steps, num_steps // 20, "linear")
    for step in range(num_steps):
        row = Row.of(topic_documents(batch_size, seed=1_000_000 * task.seed + step))
        sft(adapted.score(row), row).mean.backward()
        optimiser.step(schedule.at(step))
    return _held_out_loss(adapted)


def _held_out_loss(adapted: AdaptedModel) -> float:
    with torch.no_grad():
        row = Row.of(topic_documents(128, seed=-1))
        return float(sft(adapted.score(row), row).mean)


def loss_without_adapter(folder: Path) -> float:
    """The held-out loss of the pretrained model: of an adapter that changes nothing yet."""
    model, base = _base(folder)
    adapted = attach(model, [TrainableAdapter.create(AdapterSpec("lora", rank=1), base)])
    try:
        return round(_held_out_loss(adapted), 4)
    finally:
        adapted.detach()


def best_rates(rows: Sequence[dict[str, Any]], untrained_loss: float) -> list[dict[str, Any]]:
    """For each kind, with and without its rule: the best learning rate of each rank, and how far apart they are.

    Between the three best neighbours of the grid it is the lowest point of a parabola over the logarithm. Ranks that
    have not learned the task at any rate, which takes less than half of the untrained loss, do not count for the
    distance; it is None if fewer than two have.
    """
    found = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for is_scaled in (True, False):
            chosen = [row for row in rows if (row["kind"], row["is_scaled"]) == (kind, is_scaled)]
            best = {rank: _lowest(curve(chosen, rank)) for rank in sorted({row["rank"] for row in chosen})}
            learned = {rank: loss < _LEARNED_BELOW * untrained_loss for rank, (_, loss) in best.items()}
            exponents = [value for rank, (value, _) in best.items() if learned[rank]]
            found.append(
                {
                    "kind": kind,
                    "is_scaled": is_scaled,
                    "log2_rates": {str(rank): round(value, 2) for rank, (value, _) in best.items()},
                    "losses": {str(rank): round(loss, 4) for rank, (_, loss) in best.items()},
                    "learned": {str(rank): value for rank, value in learned.items()},
                    "octaves_apart": round(max(exponents) - min(exponents), 2) if len(exponents) > 1 else None,
                }
            )
    return found


def curve(rows: Sequence[dict[str, Any]], rank: int) -> list[tuple[float, float]]:
    """(learning rate, median loss of the seeds), ascending; infinite where a run failed."""
    losses: dict[float, list[float]] = {}
    for row in rows:
        if row["rank"] == rank:
            losses.setdefault(row["learning_rate"], []).append(float("inf") if row["loss"] is None else row["loss"])
    return sorted((rate, statistics.median(values)) for rate, values in losses.items())


def _lowest(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(log2 of the best learning rate, its loss on the grid)"""
    from math import isfinite, log, log2

    number = min(range(len(points)), key=lambda each: points[each][1])
    rate, loss = points[number]
    around = points[number - 1 : number + 2] if 0 < number < len(points) - 1 else []
    # Of the logarithm, so that a loss that explodes on one side does not decide alone.
    heights = [log(max(each, 1e-9)) for _, each in around if isfinite(each)]
    shift = 0.0
    if len(heights) == 3 and (bend := heights[0] - 2 * heights[1] + heights[2]) > 0:
        shift = (heights[0] - heights[2]) / (2 * bend)
    return log2(rate) + shift, loss


def draw(document: dict[str, Any], path: Path) -> None:
    """Loss over the learning rate for each rank: a column for each kind, scaled above and not below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in document["rows"]))
    figure, axes = plt.subplots(2, len(kinds), figsize=(3.6 * len(kinds), 6), layout="constrained", squeeze=False)
    for line, is_scaled in enumerate((True, False)):
        for column, kind in enumerate(kinds):
            chosen = [row for row in document["rows"] if (row["kind"], row["is_scaled"]) == (kind, is_scaled)]
            ranks = sorted({row["rank"] for row in chosen})
            plot = axes[line][column]
            for number, rank in enumerate(ranks):
                rates, losses = zip(*curve(chosen, rank), strict=True)
                color = plt.get_cmap("viridis")(number / max(len(ranks) - 1, 1))
                plot.plot(rates, losses, marker=".", color=color, label=f"rank {rank}")
                best = min(range(len(losses)), key=losses.__getitem__)
                plot.plot(rates[best], losses[best], marker="o", color=color)
            plot.set_xscale("log", base=2)
            plot.set_yscale("log")
            plot.grid(alpha=0.3)
            plot.set_title(f"{kind}, {'scaled' if is_scaled else 'one scale for all ranks'}", fontsize="medium")
            plot.set_xlabel("learning rate")
    axes[0][0].set_ylabel("held-out loss")
    axes[1][0].set_ylabel("held-out loss")
    axes[0][-1].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
