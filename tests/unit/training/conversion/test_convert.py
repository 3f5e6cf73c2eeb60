"""A student that acts on the prompt only answers as its teacher, which acts everywhere."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters.random_adapters import write_random_lora
from support.adapters.reference_answers import answer
from support.training.small_runs import write_jsonl
from support.training.steerable import Steerable, make_steerable, steerable_rows
from transformers import DynamicCache

from adapters.formats import read_adapter
from adapters.model.manifest import revision_id_of
from adapters.model.normal_form import Adapter
from adapters.verification.reference import UNLIMITED, adapted
from samples.random_adapters import write_random_direft
from training.conversion.convert import ConversionOptions, Converted, check_teacher, convert
from training.conversion.divergence import divergence
from training.data import examples as examples_module
from training.data.columns import prompt_row
from training.data.examples import Examples
from training.data.tokens import Encoder
from training.errors import DataInvalid, OptionInvalid
from training.runs.base import LoadedBase, load_base
from training.runs.evaluation import read_for
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec

pytestmark = pytest.mark.slow

QUICK = ConversionOptions(num_steps=40, answer_tokens=6, learning_rate=0.01)
Load = Callable[..., Examples]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Steerable:
    return make_steerable(tmp_path_factory.mktemp("steerable"))


@pytest.fixture(scope="module")
def base(toy: Steerable) -> LoadedBase:
    return load_base(toy.model, "float32", "cpu")


@pytest.fixture(scope="module")
def teacher(base: LoadedBase, toy: Steerable) -> Adapter:
    return read_for(base.model, toy.teacher)


@pytest.fixture
def load(base: LoadedBase, tmp_path: Path) -> Load:
    def loaded(*rows: dict[str, Any]) -> Examples:
        return examples_module.load(
            [write_jsonl(tmp_path / "rows.jsonl", list(rows))], Encoder(base.tokenizer, base.ends), prompt_row
        )

    return loaded


@pytest.fixture(scope="module")
def converted(base: LoadedBase, teacher: Adapter, toy: Steerable) -> Converted:
    return convert(
        base, teacher, examples_module.load([toy.rows], Encoder(base.tokenizer, base.ends), prompt_row), QUICK
    )


def test_a_student_gives_its_teachers_answers_where_the_teacher_itself_cannot(converted: Converted, teacher: Adapter):
    """On held-out prompts. Applied to the prompt, the teacher leaves nothing in the KV that answers read."""
    report = converted.report
    assert (report.teacher, report.num_prompts, report.num_held_out) == (revision_id_of(teacher), 115, 29)
    assert (report.rank, report.num_steps) == (8, 40)
    assert report.teacher_exact_match is not None
    assert report.after.exact_match is not None
    assert report.teacher_exact_match > 0.8
    assert (report.before.agreement, report.before.exact_match) == (0, 0)
    assert report.after.agreement > 0.8
    assert report.after.exact_match >= report.teacher_exact_match - 0.1
    assert report.after.agreed_tokens > 0.9
    assert report.after.divergence < 0.1 < report.before.divergence
    student = converted.adapter.normal_form()
    assert (student.positions, student.max_rank) == ("prefill", 8)


def test_the_report_says_what_one_prompt_after_the_other_gives(base: LoadedBase, teacher: Adapter, load: Load):
    """Without batches, padding and chunks."""
    rows = steerable_rows()
    held_out = load(rows[3], rows[77], rows[140])
    report = convert(base, teacher, load(*rows), replace(QUICK, num_steps=1), held_out=held_out).report
    assert (report.num_prompts, report.num_held_out) == (141, 3)
    shares, divergences = [], []
    for example in held_out.examples:
        context = example.turns[0].context
        wanted = answer(base.model, teacher, context, 6, "all").tokens
        if (end := base.tokenizer.eos_token_id) in wanted:
            wanted = wanted[: wanted.index(end) + 1]
        given = answer(base.model, teacher, context, 6, "prefill").tokens
        shares.append(next(n for n, token in enumerate(wanted) if given[n] != token) / len(wanted))
        theirs, ours = (logprobs(base.model, teacher, context, wanted, positions) for positions in ("all", "prefill"))
        divergences.append((theirs.exp() * (theirs - ours)).sum(dim=1))
    assert report.before.agreed_tokens == pytest.approx(sum(shares) / 3)
    assert report.before.divergence == pytest.approx(float(torch.cat(divergences).mean()), abs=1e-4)


@torch.inference_mode()
def logprobs(model: Any, adapter: Adapter, context: list[int], tokens: list[int], positions: str) -> torch.Tensor:
    """[tokens, vocabulary] of each next token."""
    cache = DynamicCache()
    with adapted(model, adapter):
        first = model(torch.tensor([list(context)]), past_key_values=cache).logits[0, -1:]
    with adapted(model, adapter) if positions == "all" else nullcontext():
        rest = model(torch.tensor([tokens[:-1]]), past_key_values=cache).logits[0]
    return torch.cat([first, rest]).double().log_softmax(dim=1)


def test_gradients_reach_the_student_only():
    torch.manual_seed(0)
    head, teacher, student = torch.nn.Linear(6, 11), torch.randn(5, 6), torch.randn(5, 6, requires_grad=True)
    found = divergence(head, teacher, student)
    theirs, ours = (head(states).log_softmax(dim=1) for states in (teacher, student))
    expected = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(dim=1)
    torch.testing.assert_close(found, expected)
    [gradient] = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0])
    assert divergence(head, teacher, teacher.clone()).abs().max() < 1e-6


def test_a_student_begins_as_its_teacher(base: LoadedBase, tmp_path: Path):
    """Of a higher rank and with places that the teacher lacks: the same answers, up to rounding."""
    directory = write_random_lora(
        tmp_path / "a", base.sizes, 3, rank=4, layers=[1], rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}
    )
    teacher = read_adapter(directory, base.sizes, UNLIMITED)
    student = TrainableAdapter.create(AdapterSpec("lora", rank=6), base.sizes)
    student.begin_as(teacher)
    begun = student.normal_form()
    assert begun.max_rank == 6
    one, other = (logprobs(base.model, each, [5, 9, 300], [4, 8, 2], "all") for each in (teacher, begun))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    unchanged = logprobs(
        base.model, TrainableAdapter.create(student.spec, base.sizes).normal_form(), [5, 9, 300], [4, 8, 2], "all"
    )
    assert (one - unchanged).abs().max() > 0.1


def test_the_same_seed_gives_the_same_student(base: LoadedBase, teacher: Adapter, load: Load):
    data, few = load(*steerable_rows()[:40]), replace(QUICK, num_steps=4, rank=9)
    ids = [
        revision_id_of(convert(base, teacher, data, replace(few, seed=seed)).adapter.normal_form())
        for seed in (1, 1, 2)
    ]
    assert ids[0] == ids[1] != ids[2]


def test_a_teacher_of_another_kind(base: LoadedBase, load: Load, tmp_path: Path):
    """Its student is a fresh LoRA."""
    directory = write_random_direft(tmp_path / "a", base.sizes, 3, rank=4)
    teacher = replace(read_adapter(directory, base.sizes, UNLIMITED), positions="all")
    data, few = load(*steerable_rows()[:40]), replace(QUICK, num_steps=6, rank=2)
    converted = convert(base, teacher, data, few)
    assert (converted.adapter.spec.kind, converted.report.rank) == ("lora", 2)


def test_without_a_lower_divergence_it_ends_early_as_it_began(base: LoadedBase, teacher: Adapter, load: Load):
    spoiled = convert(base, teacher, load(*steerable_rows()[:40]), replace(QUICK, learning_rate=0.3, num_steps=100))
    assert (spoiled.report.num_steps, spoiled.report.best_step) == (30, 0)
    assert spoiled.report.after.divergence == pytest.approx(spoiled.report.before.divergence, abs=1e-5)


def test_prompts_need_no_answers_and_come_once(base: LoadedBase, load: Load):
    rows = [
        {"prompt": "sea and boats"},
        {"prompt": "sea and boats", "completion": " the sea"},
        {"prompt": [{"role": "user", "content": "bread"}]},
        {"messages": [{"role": "user", "content": "music"}]},
        {"messages": [{"role": "user", "content": "winter"}, {"role": "assistant", "content": "lamps"}]},
    ]
    loaded = load(*rows)
    assert [len(turn.answers) for each in loaded.examples for turn in each.turns] == [0, 1, 0, 0, 1]
    with pytest.raises(DataInvalid, match="3 different prompts to learn from, 1 held out; give a few hundred"):
        convert(base, prompt_only_or_all(base, "all"), loaded, QUICK)


def prompt_only_or_all(base: LoadedBase, positions: Any) -> Adapter:
    return TrainableAdapter.create(AdapterSpec("lora", rank=2, positions=positions), base.sizes).normal_form()


def test_what_cannot_be_converted(base: LoadedBase, teacher: Adapter, load: Load):
    data = load(*steerable_rows()[:40])
    with pytest.raises(OptionInvalid, match="applied to the prompt only already; import it as it is"):
        convert(base, prompt_only_or_all(base, "prefill"), data, QUICK)
    check_teacher(replace(teacher, positions="prefill", trained_positions="all"))  # forced by hand
    with pytest.raises(OptionInvalid, match="the rank is 4; the teacher's is 8"):
        convert(base, teacher, data, replace(QUICK, rank=4))
    with pytest.raises(
        OptionInvalid, match=r"row 1: a prompt of 5 tokens, with an answer of up to 4095; the model reads 4096"
    ):
        convert(base, teacher, data, replace(QUICK, answer_tokens=4095))
    for name, value in {"rank": 0, "num_steps": 0, "answer_tokens": -1, "learning_rate": math.nan, "seed": -1}.items():
        with pytest.raises(OptionInvalid, match="nan" if value != value else str(value)):
            replace(QUICK, **{name: value})
