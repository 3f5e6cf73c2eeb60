"""Adapters of the prompt alone beside those of all positions: tasks, order, comparison, runs that are cut short."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.adapters.tiny_model import write_model_config
from support.training.small_runs import make_model

from bench.errors import BenchError
from bench.positions import grid, run
from bench.positions.compared import compared, interval, means
from bench.positions.grid import ARMS, JOBS, Cell, Job, Options, Trial, best_rates, jobs, trials
from bench.positions.tasks import Task, tasks
from training.errors import MemoryExceeded

TASKS = list(tasks().values())
RATES = {kind: {"all": 0.01, "prefill": 0.02} for kind in ("lora", "direft")}


# ---- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_held_out_questions_are_the_same_for_all_seeds_and_never_trained(task: Task):
    train, validation, held_out = task.rows(3)
    other, *kept = task.rows(4)
    assert kept == [validation, held_out]
    assert task.rows(3)[0] == train != other
    assert (len(train), len(held_out)) == (task.num_train, task.num_held_out)
    asked = [each.asked for each in (*train, *validation, *held_out)]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_only_the_right_answer_is_nearest(task: Task):
    *_, held_out = task.rows(0)
    for one, other in pairwise(held_out):
        assert task.nearness(one.answer, one.answer) == 1.0
        assert 0.0 <= task.nearness(other.answer, one.answer) <= 1.0
        assert task.nearness("", one.answer) == 0.0


@pytest.mark.parametrize(
    ("task", "given", "right", "nearness"),
    [
        ("capitals", "THE Bells", "THE BELLS", 4 / 8),
        ("records", "@Vera/Oslo :: maps*3 ~red :: mon - ;;", "@Vera/Oslo :: maps*3 ~red :: tue + ;;", 6 / 8),
        ("records", "@Vera/Oslo :: and so on and on", "@Vera/Oslo ::", 2 / 7),
        ("extraction", '{"name": "A B", "age": 20}', '{"name": "A B", "age": 21}', 1 / 2),
        ("extraction", '{"name": "A B"', '{"name": "A B"}', 0.0),
        ("extraction", '["name"]', '{"name": "A B"}', 0.0),
        ("facts", "Yorbin is from Oslo.", "Yorbin lives in Oslo.", 1.0),
        ("facts", "Yorbin lives in Kiel.", "Yorbin lives in Oslo.", 0.0),
        ("long", "a\nb\nd\nc", "a\nb\nc\nd", 2 / 4),
    ],
)
def test_nearness(task: str, given: str, right: str, nearness: float):
    assert tasks()[task].nearness(given, right) == nearness


def test_every_fact_that_is_asked_was_told_in_training():
    train, _, held_out = tasks()["facts"].rows(0)
    told = [each.answer for each in train]
    assert all(told.count(each.answer) == 4 for each in held_out)


# ---- order ----------------------------------------------------------------------------------------------------------


def test_what_matters_most_comes_first():
    found = jobs(Options(Path("model")), RATES)
    assert len(set(found)) == len(found)
    first = [Cell(task, "lora", 16, seed) for seed in range(3) for task in ("extraction", "capitals")]
    assert [job.cell for job in found[: 3 * len(first)]] == [cell for cell in first for _ in JOBS]
    of_kind = {job.cell.task for job in found if (job.cell.kind, job.cell.rank) == ("direft", 16)}
    assert of_kind == set(grid.KIND_TASKS)
    assert {job.cell.rank for job in found} == {4, 16, 64}
    assert [arm for arms in JOBS for arm in arms] != list(ARMS)
    assert sorted(arm for arms in JOBS for arm in arms) == sorted(ARMS)


def test_some_arms_are_left_out():
    found = jobs(Options(Path("model"), arms=("all-as-prefill", "prefill-more-steps")), RATES)
    assert {(job.arms, job.positions) for job in found} == {
        (("all as prefill",), "all"),
        (("prefill, more steps",), "prefill"),
    }


def test_both_position_sets_try_the_same_rates():
    found = trials(Options(Path("model")))
    of_all = [(each.kind, each.learning_rate, each.task) for each in found if each.positions == "all"]
    assert of_all == [(each.kind, each.learning_rate, each.task) for each in found if each.positions == "prefill"]


def test_the_rate_with_the_lowest_mean_loss_is_chosen():
    losses = {("a", 0.1): 1.0, ("b", 0.1): 5.0, ("a", 0.2): 2.0, ("b", 0.2): 3.0}
    found = [{**asdict(Trial("lora", "all", rate, task)), "loss": loss} for (task, rate), loss in losses.items()]
    assert best_rates(found) == {"lora": {"all": 0.2}}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kinds": ("loreft",)}, "the kind is"),
        ({"tasks": ("x",)}, "the task is"),
        ({"arms": ("x",)}, "the arm is"),
        ({"num_seeds": 9}, "9 seeds"),
    ],
)
def test_what_there_is_not_is_refused(changed: dict[str, Any], told: str):
    with pytest.raises(BenchError, match=told):
        replace(Options(Path("model")), **changed)


# ---- comparison -----------------------------------------------------------------------------------------------------


def row(arm: str, seed: int, exact: float, task: str = "extraction") -> dict[str, Any]:
    figures = dict.fromkeys(("near", "loss", "answer_tokens", "right_tokens", "endless", "steps", "seconds"), 1.0)
    return {**figures, **asdict(Cell(task, "lora", 16, seed)), "arm": arm, "exact": exact}


def test_an_interval_by_students_t():
    found = interval([0.2, 0.4, 0.6])
    assert found == {"mean": 0.4, "low": -0.0969, "high": 0.8969}
    assert interval([0.5]) == {"mean": 0.5, "low": None, "high": None}


def test_arms_are_compared_seed_by_seed():
    rows = [row("all", seed, exact) for seed, exact in enumerate((0.9, 0.7, 0.5))]
    rows += [row("prefill", seed, exact) for seed, exact in enumerate((0.8, 0.6))]
    of_all, of_prefill = compared(rows)
    assert (of_all["arm"], of_all["num_seeds"], of_all["exact"]["mean"]) == ("all", 3, 0.7)
    assert "behind" not in of_all
    assert of_prefill["behind"] == {"mean": 0.1, "low": 0.1, "high": 0.1}  # not 0: seed 2 was not trained


def test_means_are_of_whole_seeds():
    rows = [row(arm, seed, 0.5 + 0.1 * seed, task) for arm in ARMS for seed in (0, 1) for task in ("a", "b")]
    assert [line["exact"]["mean"] for line in means(rows, ("a", "b"))] == [0.55] * 5
    assert [line["exact"]["mean"] for line in means(rows[:-1], ("a", "b"))] == [0.5] * 5
    assert means(rows[:10], ("a", "b")) == []


# ---- runs -----------------------------------------------------------------------------------------------------------


class Trainings:
    """In place of training: writes down what is to be trained, in threads in place of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Job] = []
        self.tried: list[Trial] = []
        self.before: Callable[[int], None] = lambda _number: None

        class Threads(ThreadPoolExecutor):
            def __init__(self, count: int, _context: object, **_begin: object) -> None:
                super().__init__(count)

        monkeypatch.setattr(run, "ProcessPoolExecutor", Threads)
        monkeypatch.setattr(run.arms, "run_job", self.run_job)
        monkeypatch.setattr(run.arms, "try_rate", self.try_rate)

    def run_job(self, job: Job, _options: Options) -> list[dict[str, Any]]:
        self.before(len(self.done))
        self.done.append(job)
        return [row(arm, job.cell.seed, 0.5) | asdict(job.cell) for arm in job.arms]

    def try_rate(self, trial: Trial, _options: Options) -> list[dict[str, Any]]:
        self.tried.append(trial)
        return [{**asdict(trial), "loss": trial.learning_rate}]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    return Trainings(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_config(tmp_path)


def test_a_whole_run(trainings: Trainings, model: Path):
    output = model / "positions.json"
    options = Options(model, num_seeds=2, tasks=("extraction", "facts"), processes=1)
    document = run.run(options, "prelude bench positions", output, print)
    assert json.loads(output.read_text()) == document
    assert document.keys() >= {"commit", "command", "hardware", "versions", "settings"}
    assert document["ended"] == "done"
    assert document["num_jobs"] == len(trainings.done) == len(set(trainings.done))
    assert document["chosen_rates"]["lora"] == {"all": 5e-4, "prefill": 5e-4}
    assert all(job.rates == document["chosen_rates"][job.cell.kind] for job in trainings.done)
    assert {line["num_seeds"] for line in document["compared"]} == {2}


def test_a_training_that_fails_leaves_the_others_alone(trainings: Trainings, model: Path):
    def fail(number: int) -> None:
        if number == 1:
            trainings.before = lambda _number: None
            raise MemoryExceeded("the device's memory is full")

    trainings.before = fail
    output = model / "positions.json"
    with pytest.raises(BenchError, match="1 trainings failed; the first: MemoryExceeded: the device's"):
        run.run(Options(model, tasks=("facts",), processes=1), "", output, print)
    document = json.loads(output.read_text())
    assert len(document["failed"]) == 1
    assert len(trainings.done) == document["num_jobs"] - 1


@pytest.mark.long
def test_all_arms_of_a_tiny_model(tmp_path: Path):
    """In a process of its own, as ever."""
    make_model(tmp_path)
    few = {"num_seeds": 1, "num_steps": 1, "batch_size": 4, "rows": 16}
    options = Options(
        tmp_path, kinds=("direft",), ranks=(4,), tasks=("classification",), learning_rate=0.01, processes=1, **few
    )
    document = run.run(options, "", None, print)
    assert [row["arm"] for row in document["rows"]] == list(ARMS)
    of_all, as_prefill, prefill, longer, converted = document["rows"]
    assert (of_all["steps"], prefill["steps"], longer["steps"], converted["steps"]) == (1, 1, 3, 3)
    assert of_all["loss"] != as_prefill["loss"]
    assert all(row["num_rows"] == 16 and row["answer_tokens"] > 0 for row in document["rows"])
