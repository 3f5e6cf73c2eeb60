"""The layouts that the benchmark compares compute the same, so only their speed differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.errors import BenchError
from bench.training import attention_check, layouts, speed
from bench.training.profiles import PROFILES, draw_pairs, median_ratio
from bench.training.readers import reader
from training.loop.objectives import Dpo, Sft
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec

PAIRS = draw_pairs(PROFILES["hh-rlhf"], 4, seed=1, vocabulary=1024, longest=512)


@pytest.fixture(scope="module")
def model_and_adapter(tmp_path_factory):
    torch.set_num_threads(1)
    model, base = speed.make_model(speed.Options(), tmp_path_factory.mktemp("model"))
    adapter = TrainableAdapter.create(AdapterSpec("lora", rank=4), base)
    for parameter in adapter.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return model, adapter


def loss_and_gradients(model_and_adapter, name: str, rows, objective) -> tuple[float, int, list[torch.Tensor]]:
    model, adapter = model_and_adapter
    total, weight = 0.0, 0
    with reader(name, model, adapter, checkpointing=True) as found:
        for each in rows:
            loss = objective(found, each.row)
            loss.total.backward()
            total, weight = total + loss.total.item(), weight + loss.weight
        gradients = [each.grad.clone() for each in found.parameters()]
    return total, weight, gradients


@pytest.mark.slow
def test_all_layouts_have_the_same_loss_and_gradients(model_and_adapter):
    found = {
        name: loss_and_gradients(model_and_adapter, name, layout(PAIRS, 512), Dpo())
        for name, layout in (("shared", layouts.shared), ("paired", layouts.paired), ("padded", layouts.padded))
    }
    loss, weight, gradients = found["shared"]
    assert weight == len(PAIRS)
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    for name in ("paired", "padded"):
        other, pairs, others = found[name]
        assert pairs == weight
        assert other == pytest.approx(loss, abs=1e-4)
        for one, two in zip(gradients, others, strict=True):
            assert (one - two).abs().max() < 1e-4 * max(1.0, float(one.abs().max()))


@pytest.mark.slow
def test_peft_reads_the_same_rows(model_and_adapter):
    """A new LoRA of peft's changes nothing, so its loss is the base model's; afterwards the model is as it was."""
    model, adapter = model_and_adapter
    rows = layouts.answers(PAIRS, 512)
    names = [name for name, _ in model.named_modules()]
    _, weight, gradients = loss_and_gradients(model_and_adapter, "sft-peft", rows, Sft())
    assert weight == sum(len(pair.chosen) for pair in PAIRS)
    assert len(gradients) == len(list(adapter.parameters()))
    assert [name for name, _ in model.named_modules()] == names
    with reader("sft-peft", model, adapter, checkpointing=False) as peft:
        found = Sft()(peft, rows[0].row).total.item()
    with reader("sft", model, adapter, checkpointing=False) as ours:
        assert found == pytest.approx(Sft()(ours, rows[0].row.without_slots()).total.item(), rel=1e-5)


def test_rows_hold_whole_pairs_and_share_prompts():
    shared, paired, padded = (layout(PAIRS, 512) for layout in (layouts.shared, layouts.paired, layouts.padded))
    assert [sum(each.num_examples for each in rows) for rows in (shared, paired, padded)] == [len(PAIRS)] * 3
    prompts = sum(len(pair.prompt) for pair in PAIRS)
    assert sum(each.num_tokens for each in paired) - sum(each.num_tokens for each in shared) == prompts
    assert all(each.row.num_tokens == 512 for each in (*shared, *paired))
    for each in paired:
        examples = [branch.example for branch in each.row.answers]
        assert all(examples.count(example) == 2 for example in examples)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_profiles_have_the_published_medians(profile):
    pairs = draw_pairs(profile, 400, seed=0, vocabulary=10, longest=16384)
    assert pairs == draw_pairs(profile, 400, seed=0, vocabulary=10, longest=16384)
    assert median_ratio(pairs) == pytest.approx(profile.ratio, rel=0.25)
    lengths = sorted(len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    assert lengths[200] == pytest.approx(profile.overall, rel=0.2)


@pytest.mark.slow
def test_the_check_of_attention_can_fail(monkeypatch: pytest.MonkeyPatch):
    """On a CPU both sides take the same path; a mask that hides more is found."""
    torch.set_num_threads(1)
    case = attention_check.Case(head_dim=16)
    [line] = attention_check.check((case,), (256,), print, device="cpu")
    assert line["passes"]
    exact = attention_check.boolean_mask
    monkeypatch.setattr(attention_check, "boolean_mask", lambda row: exact(row) & exact(row).tril(-1).triu(-8))
    [line] = attention_check.check((case,), (256,), print, device="cpu")
    assert not line["passes"]


@pytest.mark.slow
def test_the_benchmark_writes_medians_and_ratios(tmp_path: Path):
    options = speed.Options(profiles=("hh-rlhf",), row_tokens=512, repeats=1)
    lines: list[str] = []
    document = speed.run(options, "prelude bench training", tmp_path / "out.json", lines.append)
    assert (tmp_path / "out.json").exists()
    dpo, sft = sorted(document["ratios"], key=lambda line: line["loss"])
    assert dpo["shared/paired"] == pytest.approx(dpo["shared"] / dpo["paired"], rel=0.02)
    assert sft["sft/sft-peft"] > 0
    assert {row["layout"] for row in document["rows"]} == {"shared", "paired", "padded", "sft", "sft-peft"}


def test_an_unknown_model_is_named():
    with pytest.raises(BenchError, match=r"there is no model nope; there are small, tiny, "):
        speed.run(speed.Options(model="nope"), "prelude bench training", None, print)


def test_ratios_are_medians_of_the_repeats_ratios():
    rows = [
        {"loss": "dpo", "profile": "p", "prompt_to_answer": 2, "layout": layout, "repeat": n, "examples_per_s": rate}
        for layout, rates in (("shared", (2.0, 4.0, 9.0)), ("paired", (1.0, 1.0, 3.0)))
        for n, rate in enumerate(rates)
    ]
    [line] = speed.ratios(rows)
    assert (line["shared"], line["paired"], line["shared/paired"]) == (4.0, 1.0, 3.0)
    assert "shared/padded" not in line
