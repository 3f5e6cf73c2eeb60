"""Whole runs: the loss falls, checkpoints are adapters, what fails leaves the last one."""

import errno
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.small_runs import make_model, options, write_jsonl
from transformers import AutoTokenizer

from adapters.catalog.sql import SqlCatalog
from adapters.formats import Limits, read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import open_store
from training import adapted_model
from training.errors import (
    CheckpointMismatch,
    CheckpointNotWritten,
    DataInvalid,
    LossNotFinite,
    MemoryExceeded,
    OptionInvalid,
)
from training.loop import run_folder
from training.loop import training as loop
from training.loop.batches import Batches
from training.loop.optimiser import AdamOptions, Optimiser
from training.loop.options import LoopOptions
from training.loop.run_folder import begun_at
from training.loop.training import evaluate
from training.loop.whole_folder import replace_folder
from training.losses import Dpo, Sft
from training.runs import run as runs
from training.runs.evaluation import evaluate_adapter, read_for
from training.runs.run import prepared, run
from training.trainable.spec import KINDS, AdapterSpec
from training.tree.rows import Row

pytestmark = pytest.mark.slow

DECAYING = LoopOptions(learning_rate=0.1, adam=AdamOptions(weight_decay=0.1))
ACCUMULATED = {"batch_size": 20, "row_tokens": 128}  # several rows a step
LIMITS = Limits(max_rank=16, max_bytes=64 * 1024**2)


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def of(name: str, output: Path) -> list[float]:
    return [line[name] for line in lines(output) if name in line]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_the_checkpoint_is_an_adapter(setting, tmp_path: Path, kind):
    output = tmp_path / "run"
    outcome = run(options(setting.model, setting.sft, output, kind=kind, held_out=setting.held_out, max_steps=24))
    assert outcome.is_done
    losses, held_out = of("loss", output), of("eval_loss", output)
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.1
    assert outcome.best_loss == min(held_out) < held_out[0]
    base = BaseModel.read(setting.model)
    adapter = read_adapter(output / "best", base, LIMITS)
    assert (adapter.positions, adapter.max_rank) == ("prefill", 4)
    library = AdapterLibrary(
        SqlCatalog.open(f"sqlite:///{tmp_path}/catalog.db"),
        open_store(f"file://{tmp_path}/store"),
        base,
        LIMITS,
        "float32",
    )
    try:
        assert library.import_directory("trained", output / "best").revision_id == revision_id_of(adapter)
    finally:
        library.catalog.close()


@pytest.mark.parametrize("kind", ["lora", "direft"])
@pytest.mark.parametrize("positions", ["prefill", "all"])
def test_the_evaluation_of_training_is_that_of_the_reference(setting, tmp_path: Path, kind, positions):
    """The loss of packed trees against one prompt after the other, read from the files that were written."""
    output = tmp_path / "run"
    chosen = options(
        setting.model, setting.sft, output, kind=kind, positions=positions, held_out=setting.held_out, max_steps=8
    )
    with prepared(chosen) as ready:
        outcome = ready.training.run()
        examples = ready.training._held_out._examples
        ready.model.detach()
        model, tokenizer = ready.base.model, ready.base.tokenizer
        found = evaluate_adapter(model, tokenizer, examples, read_for(model, output / "last"))
        assert found.positions == positions
        assert found.loss == pytest.approx(of("eval_loss", output)[-1], abs=2e-5)
        without = evaluate_adapter(model, tokenizer, examples)
        assert outcome.is_done
        assert abs(without.loss - found.loss) > 0.05
        other = "all" if positions == "prefill" else "prefill"
        elsewhere = evaluate_adapter(model, tokenizer, examples, read_for(model, output / "last", other))
        assert abs(elsewhere.loss - found.loss) > 1e-3


@pytest.mark.parametrize("objective", [Dpo(), Dpo(beta=0.5, label_smoothing=0.1)])
def test_preferences(setting, tmp_path: Path, objective):
    output = tmp_path / "run"
    run(
        options(
            setting.model,
            setting.preferences,
            output,
            objective=objective,
            held_out=setting.held_out_preferences,
            max_steps=16,
        )
    )
    assert of("rewards/margins", output)[-1] > of("rewards/margins", output)[0]
    assert of("eval_loss", output)[-1] < of("eval_loss", output)[0]
    names = {"loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "step"}
    assert lines(output)[0].keys() == names | {
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
        *("logps/chosen", "logps/rejected"),
    }


def test_a_log_line_is_a_mean_over_its_steps_tokens(setting, tmp_path: Path):
    """The same run, logged at every step and at every third one. Only the log is another one."""
    for every in (1, 3):
        run(options(setting.model, setting.sft, tmp_path / str(every), max_steps=7, log_every=every))
    single, triple = lines(tmp_path / "1"), lines(tmp_path / "3")
    assert [line["step"] for line in triple] == [3, 6, 7]
    assert [line["num_tokens"] for line in triple] == [single[step]["num_tokens"] for step in (2, 5, 6)]
    assert triple[2]["loss"] == single[6]["loss"]
    assert min(line["loss"] for line in single[:3]) < triple[0]["loss"] < max(line["loss"] for line in single[:3])


@pytest.mark.parametrize("objective", [Sft(), Dpo()])
@pytest.mark.parametrize("accumulated", [{}, ACCUMULATED])
def test_a_step_takes_the_gradient_of_the_mean_at_the_schedules_rate(setting, tmp_path: Path, objective, accumulated):
    """AdamW hides the gradient's length; clipping does not."""
    data = setting.sft if isinstance(objective, Sft) else setting.preferences
    chosen = options(
        setting.model, data, tmp_path / "run", objective=objective, max_steps=4, warmup_ratio=0.5, **accumulated
    )
    with prepared(chosen) as ready:
        training = ready.training
        losses = [objective(ready.model, row) for row in training._batches.rows(training._order.at(0))]
        mean = torch.stack([each.total for each in losses]).sum() / sum(each.weight for each in losses)
        gradients = torch.autograd.grad(mean, list(ready.model.adapter.parameters()), allow_unused=True)
        training.run()
    norm = torch.cat([each.flatten() for each in gradients if each is not None]).norm()
    assert of("grad_norm", tmp_path / "run")[0] == pytest.approx(float(norm), rel=1e-4)
    assert of("learning_rate", tmp_path / "run") == pytest.approx([0.01, 0.02, 0.02, 0.01])


@pytest.mark.parametrize(
    ("objective", "accumulated"), [(Sft(), {}), (Sft(), ACCUMULATED), (Dpo(), {}), (Dpo(), ACCUMULATED)]
)
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(setting, tmp_path: Path, objective, accumulated):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    data, held_out = (
        (setting.sft, setting.held_out)
        if isinstance(objective, Sft)
        else (setting.preferences, setting.held_out_preferences)
    )
    chosen = options(
        setting.model, data, whole, objective=objective, held_out=held_out, log_every=3, resume=True, **accumulated
    )
    run(chosen)
    for at in (1, 5, 6, 12):
        with prepared(replace(chosen, output=parts)) as ready:
            training = ready.training
            num_rows = len(training._batches.rows(training._order.at(0)))
            assert num_rows > 1 if accumulated else num_rows == 1
            outcome = training.run(lambda at=at, training=training: training.step >= at)
            assert outcome.step == at
    assert_same_run(whole, parts)
    again = replace(chosen, output=parts)
    assert run(again).is_done  # nothing is left to do, and nothing changes
    assert_same_run(whole, parts)


class Killed(BaseException):
    """Nothing is done from here on."""


@pytest.mark.parametrize(
    ("number", "failure"), [(0, Killed()), (1, Killed()), (1, OSError(errno.ENOSPC, "No space left on device"))]
)
def test_a_run_that_ends_between_its_two_checkpoints(
    setting, tmp_path: Path, monkeypatch, number: int, failure: BaseException
):
    """At step 8 both are replaced. What ends the run comes before the first, or the second.

    Whether it goes on as before or with other intervals: best/ is what the log and the outcome say.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(options(setting.model, setting.sft, whole, held_out=setting.held_out))
    replaced: list[Path] = []

    def counted(target: Path, write: Any) -> None:
        if ready.training.step == 8:
            if len(replaced) == number:
                raise failure
            replaced.append(target)
        replace_folder(target, write)

    monkeypatch.setattr(run_folder, "replace_folder", counted)
    chosen = options(setting.model, setting.sft, killed, held_out=setting.held_out)
    with pytest.raises((Killed, CheckpointNotWritten)), prepared(chosen) as ready:
        ready.training.run()
    monkeypatch.undo()
    assert len(replaced) == number
    other = tmp_path / "other"
    shutil.copytree(killed, other)
    changed = options(
        setting.model, setting.sft, other, held_out=setting.held_out, eval_every=100, save_every=100, resume=True
    )
    with prepared(changed) as ready:
        outcome = ready.training.run(lambda: ready.training.step >= 9)
    best = json.loads((other / "best" / "training" / "evaluation.json").read_text())
    assert (best["step"], best["eval_loss"]) == (outcome.best_step, outcome.best_loss)
    assert outcome.best_loss == min(of("eval_loss", other))
    run(options(setting.model, setting.sft, killed, held_out=setting.held_out, resume=True))
    assert_same_run(whole, killed)


def assert_same_run(one: Path, other: Path) -> None:
    """The same log and the same checkpoints, byte for byte."""
    for name in ("log.jsonl", "last/adapter_model.safetensors", "best/adapter_model.safetensors", "run.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    states = [json.loads((each / "last" / "training" / "state.json").read_text()) for each in (one, other)]
    assert states[0] == states[1]  # with a digest of parameters and moments


@dataclass(frozen=True)
class PoisonedExample(Sft):
    """NaN wherever the third example of a file is, while training or in evaluations."""

    has_gradients: bool = True

    def __call__(self, model, row):
        loss = super().__call__(model, row)
        is_bad = 2 in {branch.example for branch in row.answers}
        is_bad &= loss.total.requires_grad == self.has_gradients
        return replace(loss, total=loss.total * float("nan")) if is_bad else loss


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_loss_that_is_not_finite_is_told_with_file_and_row(setting, tmp_path: Path, has_gradients: bool):
    """The examples of the packed row that it comes from; and in `log.jsonl` is nothing that is no JSON."""
    output, held_out = tmp_path / "run", setting.held_out
    poisoned = PoisonedExample(has_gradients)
    chosen = options(setting.model, setting.sft, output, objective=poisoned, held_out=held_out, row_tokens=128)
    with pytest.raises(LossNotFinite) as failed:
        run(chosen)
    told = str(failed.value)
    path = setting.sft if has_gradients else setting.held_out
    assert "loss is nan" in told
    assert "the last checkpoint is as it was" in told
    assert f"{path}, row 3" in told
    assert all(json.loads(line, parse_constant=pytest.fail) for line in (output / "log.jsonl").read_text().splitlines())


class Steep(Sft):
    """A finite loss whose gradient is not."""

    def __call__(self, model, row):
        loss = super().__call__(model, row)
        return replace(loss, total=loss.total + (loss.total - loss.total.detach()).sqrt())


def test_a_gradient_that_is_not_finite_is_told_with_files_and_rows(setting, tmp_path: Path):
    told = rf"step 1 \({setting.sft}, row .*\): the gradient's norm is (nan|inf); .*the last checkpoint is as it was"
    with pytest.raises(LossNotFinite, match=told):
        run(options(setting.model, setting.sft, tmp_path / "run", objective=Steep()))


class Large(Sft):
    """More than the device has room for: the sixth row that is trained, or in evaluations any."""

    calls = 0
    in_evaluations = False

    def __call__(self, model, row):
        type(self).calls += torch.is_grad_enabled()
        if self.calls == 6 or (self.in_evaluations and not torch.is_grad_enabled()):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(model, row)


@pytest.mark.parametrize(("in_evaluations", "step", "kept"), [(False, 5, 4), (True, 4, 2)])
def test_a_device_without_room_ends_the_run_and_keeps_its_checkpoint(
    setting, tmp_path: Path, monkeypatch, in_evaluations: bool, step: int, kept: int
):
    monkeypatch.setattr(Large, "calls", 0)
    monkeypatch.setattr(Large, "in_evaluations", in_evaluations)
    output = tmp_path / "run"
    told = rf"after step {step}: .* rows of up to 256 tokens \(CUDA out of .* smaller --row-tokens"
    with pytest.raises(MemoryExceeded, match=told):
        run(options(setting.model, setting.sft, output, objective=Large(), held_out=setting.held_out))
    assert json.loads((output / "last" / "training" / "state.json").read_text())["step"] == kept


def test_parameters_that_are_not_finite_are_not_kept(setting, tmp_path: Path, monkeypatch):
    """An update that overflows, after a loss and gradients that were finite."""
    step, steps = Optimiser.step, []

    def overflow(self: Optimiser, learning_rate: float, *arguments, **options) -> float:
        norm = step(self, learning_rate, *arguments, **options)
        steps.append(learning_rate)
        if len(steps) == 4:
            next(iter(self._parameters.values())).data[0, 0] = float("inf")
        return norm

    monkeypatch.setattr(Optimiser, "step", overflow)
    output = tmp_path / "run"
    with pytest.raises(LossNotFinite, match=r"step 4: .* is not finite any more; the last checkpoint is as it was"):
        run(options(setting.model, setting.sft, output))
    assert json.loads((output / "last" / "training" / "state.json").read_text())["step"] == 2


def test_another_base_model_is_refused(setting, tmp_path: Path):
    """Also one of the same sizes."""
    output = tmp_path / "run"
    run(options(setting.model, setting.sft, output, max_steps=2))
    other = make_model(tmp_path / "other")
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    save_file({name: each + 0.01 for name, each in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointMismatch, match=r"base model weights was .* and is .* now"):
        run(options(other, setting.sft, output, max_steps=2, resume=True))
    with pytest.raises(CheckpointMismatch, match="data was"):
        run(options(setting.model, setting.held_out, output, max_steps=2, resume=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": Path("gone")}, "gone"),
        ({"device": "nonsense"}, "the device is 'nonsense'"),
        ({"max_tokens": 100_000}, "examples of 100000 tokens; the model reads 4096"),
        ({"max_tokens": 0}, "max tokens is 0"),
        ({"adapter": AdapterSpec("loreft"), "loop": DECAYING}, "the weight decay is 0.1; loreft has none"),
        ({"data": [Path("gone.jsonl")]}, "gone.jsonl cannot be read"),
    ],
)
def test_options_that_cannot_be(setting, tmp_path: Path, changed: dict[str, Any], message: str):
    chosen = options(setting.model, setting.sft, tmp_path / "run")
    with pytest.raises(OptionInvalid, match=message):
        run(replace(chosen, **changed))
    assert not (tmp_path / "run").exists()


def test_over_long_examples_can_be_left_out(setting, tmp_path: Path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "sea " * n, "completion": "bread"} for n in (1, 99)])
    chosen = replace(options(setting.model, data, tmp_path / "run"), max_tokens=64)
    with pytest.raises(DataInvalid, match=r"row 2: over-long"):
        run(chosen)
    with prepared(replace(chosen, leave_out_long=True)) as ready:
        assert (ready.num_examples, ready.num_too_long) == (1, 1)


@pytest.mark.parametrize("fixed_rows", [False, True])
def test_rows_have_one_length_where_it_is_wanted(setting, tmp_path: Path, fixed_rows: bool):
    """As kernels in 16 bits need it, in training and in evaluations."""
    chosen = options(
        setting.model, setting.sft, tmp_path / "run", held_out=setting.held_out, row_tokens=1024, fixed_rows=fixed_rows
    )
    with prepared(chosen) as ready:
        for batches in (ready.training._batches, ready.training._held_out):
            assert ({row.num_tokens for row in batches.rows(range(4))} == {1024}) == fixed_rows


def test_checkpointing_reads_layers_again_and_changes_nothing(setting, tmp_path: Path, monkeypatch):
    read: list[bool] = []
    checkpoint = adapted_model.checkpoint

    def noted(*arguments: Any, **flags: Any) -> Any:
        read.append(True)
        return checkpoint(*arguments, **flags)

    monkeypatch.setattr(adapted_model, "checkpoint", noted)
    for checkpointing in (False, True):
        chosen = options(setting.model, setting.sft, tmp_path / str(checkpointing), max_steps=2)
        run(replace(chosen, checkpointing=checkpointing))
        assert bool(read) == checkpointing
    assert of("loss", tmp_path / "True") == pytest.approx(of("loss", tmp_path / "False"), abs=1e-6)


def test_another_seed_is_another_adapter_and_another_order(setting, tmp_path: Path):
    started: list[torch.Tensor] = []
    orders: list[list[int]] = []
    for number, seed in enumerate((0, 0, 1)):
        with prepared(options(setting.model, setting.sft, tmp_path / str(number), seed=seed)) as ready:
            started.append(torch.cat([each.detach().flatten() for each in ready.model.adapter.parameters()]))
            orders.append(ready.training._order.at(0))
    assert torch.equal(started[0], started[1])
    assert not torch.equal(started[0], started[2])
    assert orders[0] == orders[1] != orders[2]


def test_examples_longer_than_a_sliding_window_are_refused_before_training(setting, tmp_path: Path):
    """The default is what the window has room for."""
    model = shutil.copytree(setting.model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    changed = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0, "layer_types": layers}
    (model / "config.json").write_text(json.dumps(config | changed))
    chosen = options(model, setting.sft, tmp_path / "run", max_steps=1)
    with pytest.raises(OptionInvalid, match="examples of 65 tokens; the model attends to, with its sliding window, 64"):
        run(replace(chosen, max_tokens=65))
    assert not (tmp_path / "run").exists()
    data = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "sea " * 100, "completion": "bread"}])
    with pytest.raises(DataInvalid, match="at most 64 are trained"):
        run(replace(chosen, data=[data]))


def test_a_run_whose_template_has_the_date_is_resumed_on_another_day(setting, tmp_path: Path, monkeypatch):
    model = shutil.copytree(setting.model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ strftime_now('%d %b') }}" + tokenizer.chat_template
    tokenizer.save_pretrained(model)
    days = iter([datetime(2024, 7, 26), datetime(2024, 7, 27), datetime(2024, 7, 28)])
    monkeypatch.setattr(runs, "_now", lambda: next(days))
    chosen = options(model, setting.sft, tmp_path / "run", max_steps=2, resume=True)
    with prepared(chosen) as ready:
        ready.training.run(lambda: ready.training.step == 1)
    assert run(chosen).is_done
    assert begun_at(tmp_path / "run") == datetime(2024, 7, 26)
    run(replace(chosen, output=tmp_path / "later"))
    data = [json.loads((tmp_path / name / "run.json").read_text())["data"] for name in ("run", "later")]
    assert data[0] != data[1]  # the date is part of what is trained


def test_a_push_that_failed_at_the_end_is_repeated_by_resume(setting, tmp_path: Path):
    pushed: list[int] = []
    chosen = options(setting.model, setting.sft, tmp_path / "run", max_steps=2)
    for resume in (False, True):
        with prepared(
            replace(chosen, resume=resume), evaluated=lambda step, _, folder: pushed.append((step, folder.name))
        ) as ready:
            assert ready.training.run().is_done
    assert pushed == [(2, "last"), (2, "last")]


def test_a_log_that_fails_ends_the_run_with_its_error_and_lets_go_of_the_folder(setting, tmp_path: Path):
    class Failing:
        def begin(self, step: int) -> None: ...

        def write(self, step: int, metrics: Any) -> None:
            raise CheckpointNotWritten("no room")

        def close(self) -> None:
            raise OSError("no room either")

    chosen = options(setting.model, setting.sft, tmp_path / "run", max_steps=2)
    with pytest.raises(OSError, match="no room either"), prepared(chosen, logs=lambda _: [Failing()]) as ready:
        ready.training.run()
    assert run(replace(chosen, resume=True)).is_done  # nobody holds it


def test_an_evaluation_has_some_of_the_rows_in_memory_at_a_time(setting, tmp_path: Path, monkeypatch):
    asked: list[int] = []
    rows = Batches.rows

    def counted(self: Batches, numbers: Sequence[int]) -> list[Row]:
        asked.append(len(numbers))
        return rows(self, numbers)

    chosen = options(setting.model, setting.sft, tmp_path / "run", held_out=setting.held_out, max_steps=1)
    with prepared(chosen) as ready:
        training = ready.training
        whole = evaluate(ready.model, training._objective, training._held_out)
        monkeypatch.setattr(Batches, "rows", counted)
        monkeypatch.setattr(loop, "_EVALUATED_AT_ONCE", 3)
        parts = evaluate(ready.model, training._objective, training._held_out)
    assert asked == [3, 1]
    assert parts == pytest.approx(whole, abs=1e-6)
