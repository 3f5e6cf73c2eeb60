"""`prelude train`: exit codes, what it prints, and that flags reach the engine of training."""

import argparse
import json
import os
import signal
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Prelude
from support.held_calls import failing
from support.training.small_runs import make_model, preference_rows, sft_rows, write_jsonl
from support.training.training_models import scramble

from adapters.model.base_model import BaseModel
from cli.main import _parser
from cli.train.options import add_options, run_options
from training.errors import OptionInvalid, PushFailed
from training.loop.training import Training
from training.runs.push import PushTarget
from training.trainable.adapter import TrainableAdapter
from training.trainable.files import write_adapter
from training.trainable.spec import AdapterSpec

pytestmark = pytest.mark.slow

FEW = ("--max-steps", "2", "--batch-size", "4", "--row-tokens", "256", "--rank", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", sft_rows(8))


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("train",))


def chosen(*arguments: str):
    return run_options(_parser().parse_args(["train", *arguments, "--model", "m", "--data", "d", "--output", "o"]))


def test_what_follows_from_objective_kind_and_device():
    sft, dpo = chosen("sft", "--device", "cpu"), chosen("dpo", "--device", "cuda", "--kind", "direft")
    assert (sft.dtype, sft.loop.learning_rate, sft.loop.fixed_rows) == ("float32", 2e-4, False)
    assert (dpo.dtype, dpo.loop.learning_rate, dpo.loop.fixed_rows) == ("bfloat16", 1e-4, True)


# Flag with its values, where the run has it, as what. None of them is its default.
REACHES: dict[str, tuple[str, Any]] = {
    "--model base": ("model", Path("base")),
    "--data a b": ("data", [Path("a"), Path("b")]),
    "--eval-data c d": ("held_out", [Path("c"), Path("d")]),
    "--output run": ("output", Path("run")),
    "--resume": ("resume", True),
    "--kind loreft": ("adapter.kind", "loreft"),
    "--rank 3": ("adapter.rank", 3),
    "--alpha 5": ("adapter.alpha", 5.0),
    "--positions all": ("adapter.positions", "all"),
    "--modules q_proj v_proj": ("adapter.modules", ("q_proj", "v_proj")),
    "--layers 1 3": ("adapter.layers", (1, 3)),
    "--beta 0.5": ("objective.beta", 0.5),
    "--label-smoothing 0.1": ("objective.label_smoothing", 0.1),
    "--learning-rate 0.3": ("loop.learning_rate", 0.3),
    "--epochs 2.5": ("loop.num_epochs", 2.5),
    "--max-steps 7": ("loop.max_steps", 7),
    "--batch-size 5": ("loop.batch_size", 5),
    "--warmup-ratio 0.2": ("loop.warmup_ratio", 0.2),
    "--decay cosine": ("loop.decay", "cosine"),
    "--weight-decay 0.4": ("loop.adam.weight_decay", 0.4),
    "--max-grad-norm 0.6": ("loop.adam.max_grad_norm", 0.6),
    "--seed 9": ("loop.seed", 9),
    "--max-tokens 100": ("max_tokens", 100),
    "--leave-out-long": ("leave_out_long", True),
    "--row-tokens 256": ("loop.row_tokens", 256),
    "--gradient-checkpointing": ("checkpointing", True),
    "--dtype bfloat16": ("loop.fixed_rows", True),
    "--device cuda": ("device", "cuda"),
    "--log-every 2": ("loop.log_every", 2),
    "--eval-data c --eval-every 3": ("loop.eval_every", 3),
    "--save-every 4": ("loop.save_every", 4),
}
PUSHES = {"--push", "--push-alias", "--router"}  # `test_pushes`


@pytest.mark.parametrize("flags", REACHES)
def test_a_flag_reaches_the_run(flags: str):
    where, expected = REACHES[flags]
    required = [] if flags.startswith("--device") else ["--device", "cpu"]
    for each in ("--model", "--data", "--output"):
        required += [] if flags.startswith(each) else [each, "x"]
    given, without = (
        attrgetter(where)(run_options(_parser().parse_args(["train", "dpo", *required, *more])))
        if more is not None
        else None
        for more in (flags.split(), None if where in ("model", "data", "output", "device") else [])
    )
    assert given == expected
    assert without != expected


def test_every_flag_is_looked_at():
    command = argparse.ArgumentParser(add_help=False)
    add_options(command, is_preference=True)
    looked_at = {word for flags in REACHES for word in flags.split() if word.startswith("--")}
    assert {name for action in command._actions for name in action.option_strings} == looked_at | PUSHES


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("sft", "--row-tokens", "100"), "multiple of 128"),
        (("sft", "--batch-size", "0"), "batch size is 0"),
        (("sft", "--learning-rate", "0"), "is 0; "),  # which is not taken for the default
        (("sft", "--max-tokens", "0"), "is 0; "),
        (("sft", "--kind", "direft", "--alpha", "8"), "--alpha is of lora; direft has 1/√rank"),
        (("sft", "--eval-every", "5"), "--eval-every is for --eval-data"),
        (("sft", "--push-alias", "prod"), "--push-alias is for --push"),
        (("dpo", "--beta", "inf"), "beta is inf; it must be positive and finite"),
    ],
)
def test_flags_without_effect_or_sense_are_refused(flags: tuple[str, ...], message: str):
    with pytest.raises(OptionInvalid, match=message):
        chosen(*flags, "--device", "cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sft --output o --push a --router localhost:8000", "the router's URL is 'localhost:8000'; it is like http://"),
        ("sft --output a --output b", "--output is given twice; a run trains one adapter, so start a run for each"),
        ("sft --output o --push a --push b", "--push is given twice; a run trains one adapter"),
        ("eval --rows 0", "--rows is 0; it must be at least 1"),
        ("eval --positions all --compare-positions d", "leave --positions out"),
    ],
)
def test_what_is_refused_before_a_model_is_read(words: str, message: str, train: Prelude):
    train.refuses(*words.split(), "--model", "m", "--data", "d", "--device", "cpu", says=message, status=2)


def test_train_evaluate_resume(model: Path, rows: Path, tmp_path: Path, train: Prelude, prelude: Prelude):
    output = tmp_path / "run"
    sft = ("sft", "--model", model, "--data", rows, "--eval-data", rows, "--output", output, *FEW)
    status, told, progress = train(*sft)
    assert (status, f"Next: prelude adapters import NAME {output / 'best'}" in told) == (0, True)
    assert "8 examples" in progress
    assert "step 2/2  loss" in progress
    train.refuses(*sft, says="has a run; --resume continues it", status=2)
    train.prints(*sft, "--resume")
    assert "of peft" in prelude.prints("adapters", "verify", output / "best", "--model", model)

    evaluate = ("eval", "--model", model, "--data", rows, "--rows", "2", "--adapter", output / "best")
    base, adapter = train.json(*evaluate)
    assert (base["positions"], adapter["positions"], adapter["max_rank"]) == (None, "prefill", 4)
    assert base["eval_loss"] != adapter["eval_loss"]
    assert {answer["where"] for answer in adapter["answers"]} == {f"{rows}, row 1", f"{rows}, row 2"}
    assert "exact match" in train.prints(*evaluate)
    train.refuses("eval", "--model", model, "--data", rows, "--adapter", tmp_path, says="is no adapter", status=2)


def test_faults_of_the_data_end_it(model: Path, tmp_path: Path, train: Prelude):
    path = write_jsonl(tmp_path / "rows.jsonl", [*preference_rows(2), {"prompt": "a", "chosen": "b", "rejected": ""}])
    run = ("dpo", "--model", model, "--data", path, "--output", tmp_path / "run", *FEW)
    train.refuses(*run, says=f"{path}, row 3: `rejected` is an empty answer")
    assert not (tmp_path / "run").exists()


def test_a_signal_stops_it_after_its_step(
    model: Path, rows: Path, tmp_path: Path, train: Prelude, monkeypatch: pytest.MonkeyPatch
):
    step = Training._train_step

    def step_and_signal(self: Training) -> None:
        step(self)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "_train_step", step_and_signal)
    output = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    run = ("sft", "--model", model, "--data", rows, "--output", output, *FEW)
    train.refuses(*run, says="stopped after step 1 of 2; --resume continues", status=128 + signal.SIGTERM)
    assert json.loads((output / "last" / "training" / "state.json").read_text())["step"] == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_pushes(model: Path, rows: Path, tmp_path: Path, train: Prelude, monkeypatch: pytest.MonkeyPatch):
    """After each evaluation; one that fails does not end training."""
    pushed: list[tuple[PushTarget, int]] = []

    def push(target: PushTarget, folder: Path) -> dict:
        step = json.loads((folder / "training" / "state.json").read_text())["step"]
        pushed.append((target, step))
        if step == 2:
            raise PushFailed("no room")
        return {"number": step}

    monkeypatch.setattr(PushTarget, "push", push)
    monkeypatch.setattr(PushTarget, "check", lambda target: None)
    monkeypatch.setenv("PRELUDE_API_KEY", "secret")
    flags = ("--max-steps", "3", "--eval-every", "1", "--push", "acme/legal", "--router", "http://r:1")
    run = ("sft", "--model", model, "--data", rows, "--eval-data", rows, "--output", tmp_path / "run", *FEW)
    status, _, told = train(*run, *flags)
    assert status == 0
    assert [step for _, step in pushed] == [1, 2, 3]
    target = pushed[0][0]
    assert (target.url, target.name, target.key, target.alias) == ("http://r:1", "acme/legal", "secret", "latest")
    assert "step 1 is acme/legal@latest r1" in told
    assert "step 2 was not pushed: no room" in told


def test_a_router_that_takes_no_push_is_found_before_training(model: Path, rows: Path, tmp_path: Path, train: Prelude):
    run = ("sft", "--model", model, "--data", rows, "--output", tmp_path / "run", *FEW)
    push = ("--push", "legal", "--router", "http://127.0.0.1:1")
    train.refuses(*run, *push, says="http://127.0.0.1:1 cannot be pushed to")
    assert not (tmp_path / "run").exists()


def test_a_last_push_that_fails_is_a_failure(
    model: Path, rows: Path, tmp_path: Path, train: Prelude, monkeypatch: pytest.MonkeyPatch
):
    failing(monkeypatch, PushTarget, "push", PushFailed("no room"))
    monkeypatch.setattr(PushTarget, "check", lambda target: None)
    run = ("sft", "--model", model, "--data", rows, "--output", tmp_path / "run", *FEW, "--push", "legal")
    train.refuses(*run, says="step 2 was not pushed: no room")


def test_it_says_what_it_will_do(model: Path, tmp_path: Path, train: Prelude, monkeypatch: pytest.MonkeyPatch):
    """With few rows, several epochs; small models get one thread."""
    rows = write_jsonl(tmp_path / "rows.jsonl", sft_rows(8))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    flags = ("--batch-size", "4", "--row-tokens", "256", "--rank", "4", "--device", "cpu", "--log-every", "2")
    status, _, told = train("sft", "--model", model, "--data", rows, "--output", tmp_path / "run", *flags)
    assert status == 0
    assert "40 steps in 20 epochs" in told
    assert "the first step took" in told
    assert threads == [1]


def test_positions_are_compared_beside_the_base(model: Path, rows: Path, tmp_path: Path, train: Prelude):
    """One command: the base model, and the adapter at all positions and at the prompt only, each answer as it comes."""
    adapter, answers = tmp_path / "adapter", tmp_path / "answers.jsonl"
    adapter.mkdir()
    trained = scramble(TrainableAdapter.create(AdapterSpec("lora", rank=2, positions="all"), BaseModel.read(model)))
    write_adapter(trained, adapter, "base")
    compare = ("eval", "--model", model, "--data", rows, "--compare-positions", adapter, "--device", "cpu")
    lines = train.prints(*compare, "--answers", answers).splitlines()
    assert lines[0] == "11 prompts"
    assert [line.split()[-5] for line in lines[2:]] == ["-", "all", "prefill"]
    documents = train.json(*compare)
    assert [each["positions"] for each in documents] == [None, "all", "prefill"]
    assert len({each["eval_loss"] for each in documents}) == 3
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    for document, of_document in zip(documents, (written[:11], written[11:22], written[22:]), strict=True):
        assert {(each["adapter"], each["positions"]) for each in of_document} == {
            (document["adapter"], document["positions"])
        }
        told = sorted((each["where"], each["given"], each["loss"]) for each in of_document)
        assert told == sorted((each["where"], each["given"], each["loss"]) for each in document["answers"])
