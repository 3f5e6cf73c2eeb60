"""What is trained, and in which order: a run that is cut short has whole seeds of what matters most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from adapters.model.normal_form import POSITIONS, Positions
from bench.errors import BenchError
from bench.positions.tasks import Task, tasks
from training.runs.base import Dtype
from training.trainable.spec import Kind

ALL, AS_PREFILL, CONVERTED = "all", "all as prefill", "converted"
PREFILL, PREFILL_LONGER = "prefill", "prefill, more steps"
ARMS = (ALL, AS_PREFILL, PREFILL, PREFILL_LONGER, CONVERTED)
# Arms of one job: those of one training, so that the trained adapter is at hand.
JOBS = ((ALL, AS_PREFILL, CONVERTED), (PREFILL,), (PREFILL_LONGER,))
LONGER = 3  # times the steps
CONVERSION_STEPS = 2  # times the steps at most, so that a converted adapter has as many as `PREFILL_LONGER`
MAIN_RANK = 16
KIND_TASKS = ("extraction", "capitals", "records", "classification", "facts", "long")  # of six kinds
LENGTH_TASKS = ("lines-1", "lines-4", "lines-10", "lines-36")  # answers of some 10, 40, 100 and 400 tokens
RANK_TASKS = ("extraction", "capitals", "records")
RATE_TASKS = ("extraction", "capitals")
RATES: Mapping[Kind, tuple[float, ...]] = {"lora": (5e-4, 1.5e-3, 4.5e-3), "direft": (1e-3, 4e-3, 1.6e-2)}
RATE_SEED = 1000
MAX_SEEDS = 8
MAX_TOKENS = 1024  # of a prompt with its answer


def slug(arm: str) -> str:
    """As the command line has it."""
    return arm.replace(",", "").replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    model: Path
    device: str = "cpu"  # "cuda": all GPUs
    kinds: tuple[Kind, ...] = ("lora", "direft")
    ranks: tuple[int, ...] = (4, 16, 64)
    tasks: tuple[str, ...] = (*KIND_TASKS, *LENGTH_TASKS)
    arms: tuple[str, ...] = tuple(map(slug, ARMS))
    num_seeds: int = 3
    num_steps: int = 40
    batch_size: int = 16
    rows: int | None = None  # of training and held-out rows at most so many; None: as the tasks say
    learning_rate: float | None = None  # in place of the best of RATES
    processes: int | None = None  # None: one for two cores

    def __post_init__(self) -> None:
        """Raises BenchError."""
        of_arms = ("arm", self.arms, [slug(arm) for arm in ARMS])
        for name, chosen, known in (("kind", self.kinds, RATES), ("task", self.tasks, tasks()), of_arms):
            if unknown := [each for each in chosen if each not in known]:
                raise BenchError(f"the {name} is {unknown[0]!r}; there are {', '.join(known)}")
        if self.num_seeds > MAX_SEEDS:
            raise BenchError(f"{self.num_seeds} seeds; at most {MAX_SEEDS} are compared")

    @property
    def dtype(self) -> Dtype:
        """As `prelude train` chooses it."""
        return "float32" if self.device == "cpu" else "bfloat16"


@dataclass(frozen=True, slots=True)
class Cell:
    """What all arms have in common."""

    task: str
    kind: Kind
    rank: int
    seed: int


@dataclass(frozen=True, slots=True)
class Job:
    """One training with the answers of the arms that use it."""

    cell: Cell
    arms: tuple[str, ...]
    rates: Mapping[str, float] = field(default_factory=dict, compare=False)  # by positions

    @property
    def positions(self) -> Positions:
        return "all" if {ALL, AS_PREFILL, CONVERTED} & {*self.arms} else "prefill"


@dataclass(frozen=True, slots=True)
class Trial:
    """One training that tries a learning rate, on validation rows and a seed that nothing else uses."""

    kind: Kind
    positions: Positions
    learning_rate: float
    task: str


def trials(options: Options) -> list[Trial]:
    """All kinds and positions try equally many rates, on the same tasks."""
    chosen = [name for name in RATE_TASKS if name in options.tasks] or list(options.tasks[:1])
    return [
        Trial(kind, positions, rate, task)
        for kind in options.kinds
        for rate, positions, task in product(RATES[kind], POSITIONS, chosen)
    ]


def best_rates(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By kind and positions the rate with the lowest validation loss, its mean over the tasks."""
    losses: dict[tuple[str, str], dict[float, list[float]]] = {}
    for each in found:
        of_rates = losses.setdefault((each["kind"], each["positions"]), {})
        of_rates.setdefault(each["learning_rate"], []).append(each["loss"])
    best: dict[str, dict[str, float]] = {}
    for (kind, positions), of_rates in losses.items():
        best.setdefault(kind, {})[positions] = min((fmean(each), rate) for rate, each in of_rates.items())[1]
    return best


def jobs(options: Options, rates: Mapping[str, Mapping[str, float]]) -> list[Job]:
    """In the order in which they begin."""
    chosen = [tuple(arm for arm in arms if slug(arm) in options.arms) for arms in JOBS]
    cells = dict.fromkeys(_cells(options))
    return [Job(cell, arms, rates.get(cell.kind, {})) for cell in cells for arms in chosen if arms]


def _cells(options: Options) -> Iterator[Cell]:
    ranks = [MAIN_RANK] if MAIN_RANK in options.ranks else list(options.ranks[:1])
    others = [rank for rank in options.ranks if rank not in ranks]
    seeds = range(options.num_seeds)

    def cells(names: Sequence[str], kinds: Sequence[Kind], of_ranks: Sequence[int]) -> Iterator[Cell]:
        chosen = [name for name in names if name in options.tasks]
        for kind, rank, seed, name in product(kinds, of_ranks, seeds, chosen):
            if kind in options.kinds:
                yield Cell(name, kind, rank, seed)

    short = [name for name in KIND_TASKS if name != "long"]
    yield from cells(RATE_TASKS, ["lora"], ranks)
    for names in (short, ["long"]):  # long answers take most of the time
        yield from cells(names, options.kinds, ranks)
    yield from cells(RANK_TASKS, options.kinds[:1], others)
    yield from cells(LENGTH_TASKS, options.kinds[:1], ranks)
    yield from cells(RANK_TASKS, options.kinds[1:], others)


def task_of(name: str) -> Task:
    return tasks()[name]
