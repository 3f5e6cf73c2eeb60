"""Families of mixtures, with LoRA on experts and every other kind of adapter, alone and in mixed batches."""

import dataclasses
import random
import statistics
from pathlib import Path

import pytest
from support.adapters.random_adapters import (
    write_random_expert_lora,
    write_random_lora,
    write_random_mixed,
    write_random_reft,
)
from support.engines.bfloat16 import Judge, cases_of
from support.engines.model_families import make_family
from support.engines.parity import Case
from support.engines.running_engine import DEVICE, MODULES, AdapterSlots, engine_spec, running_engine
from support.engines.unified_engine import Unified, check, tokens

from adapters.model.base_model import BaseModel
from engine.base_models import fitted_to

ON_GPU = DEVICE != "cpu"
SLOTS, RANK, EXPERT_RANK = 2, 16, 8  # fewer slots than adapters: each is filled many times, after larger adapters
LONG = [(family, ranks) for family in ("qwen3_moe", "qwen3_vl_moe") for ranks in (1, 2)]
EVERYWHERE = {"prelude": {"positions": "all"}}


def directories_of(base: BaseModel, root: Path) -> dict[str, Path]:
    def experts(name: str, seed: int, **options) -> Path:
        return write_random_expert_lora(root / name, base, seed, **options)

    return {
        "all": experts("all", 1, rank=EXPERT_RANK),
        "some": experts("some", 2, rank=EXPERT_RANK, experts=[0, 2], layers=[0, 2]),
        "low": experts("low", 3, rank=3),  # up's A begins at row 8 of the slot, not at 3
        "gate": experts("gate", 4, rank=5, modules=["gate_proj"]),
        "down": experts("down", 5, rank=2, modules=["down_proj"], experts=[1]),
        "attention-too": experts("attention-too", 6, rank=4, attention=["q_proj", "o_proj"]),
        "everywhere": experts("everywhere", 7, rank=4, config=EVERYWHERE),
        "zero": experts("zero", 8, rank=EXPERT_RANK, zero=True),
        "attention": write_random_lora(root / "attention", base, 9, modules=base.slot_modules(), rank=RANK),
        "direft": write_random_reft(root / "direft", base, 10, rank=8),
        "mixed": write_random_mixed(root / "mixed", base, 11, modules=["q_proj"]),
    }


@pytest.mark.skipif(ON_GPU, reason="GPU engines do not run in float32")
@pytest.mark.parametrize(
    ("family", "ranks"),
    [("mixtral", 1), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_parity(tmp_path: Path, tmp_path_factory, family: str, ranks: int):
    make_family(family, tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    directories = directories_of(base, tmp_path / "adapters")
    slots = AdapterSlots(SLOTS, RANK, MODULES, EXPERT_RANK)
    scratch = tmp_path_factory.mktemp("e") / "s"
    spec = engine_spec("unified", tmp_path / "model", scratch, adapters=slots, tensor_parallel=ranks)
    with running_engine(fitted_to(spec, base), tmp_path / "cache") as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        unified = Unified(engine, directories, revisions, tmp_path)
        cases = unified.cases([(name, tokens(count, 7)) for name in (None, *directories) for count in (20, 150)])
        check_that_adapters_matter(cases)
        for case in cases:
            check(case, unified.ask(case))
        shuffled = random.Random(1).sample(cases, len(cases))
        for case, answer in zip(shuffled, unified.ask_together(shuffled), strict=True):
            check(case, answer)
        check_that_zeros_keep_the_bits(unified, cases)
        with pytest.raises(AssertionError, match=f"rank {EXPERT_RANK + 1} on experts"):
            engine.load(write_random_expert_lora(tmp_path / "larger", base, 12, rank=EXPERT_RANK + 1, experts=[0]))
        larger, smaller = (next(case for case in cases if case.adapter == name) for name in ("all", "down"))
        for case in 2 * (larger, smaller):  # of what is in a slot, nothing stays when another adapter takes it
            assert unified.unload(case.adapter).status_code == 200
            engine.load(directories[case.adapter])
            check(case, unified.ask(case))


def check_that_adapters_matter(cases: list[Case]) -> None:
    """In the reference every adapter but one changes a prompt's log-probabilities by far more than the tolerance."""
    base = {case.prompt: case.reference["prompt_logprobs"] for case in cases if case.adapter is None}
    for case in cases:
        changes = zip(base[case.prompt][1:], case.reference["prompt_logprobs"][1:], strict=True)
        largest = max(abs(before - after) for before, after in changes)
        assert (largest > 1e-2) == (case.adapter not in (None, "zero")), (case.name, largest)


def check_that_zeros_keep_the_bits(unified: Unified, cases: list[Case]) -> None:
    """An adapter of zeros runs Prelude's experts, the base model SGLang's: the log-probabilities are the same."""
    for case in cases:
        if case.adapter == "zero":
            zero, base = (unified.ask(dataclasses.replace(case, adapter=name)) for name in ("zero", None))
            assert zero["choices"][0]["logprobs"] == base["choices"][0]["logprobs"]


@pytest.mark.skipif(not ON_GPU, reason="test_parity does it in float32")
@pytest.mark.parametrize(("family", "ranks"), [("qwen3_moe", 1), ("mixtral", 1), ("qwen3_moe", 2)])
def test_parity_on_gpus(tmp_path: Path, tmp_path_factory, family: str, ranks: int):
    """SGLang's kernels for LoRA on experts, from packed slots, in mixed batches.

    Tolerance: in bfloat16 a tenth of the tokens get another expert than in float32, and differ by 0.1 to 1. So the
    median difference of a prompt's, and of an answer's, log-probabilities is at most 0.05; and that of a prompt is less
    than half as far from its own adapter's reference as from any other's.
    """
    import torch

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"it takes {ranks} GPUs")
    make_family(family, tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    directories = directories_of(base, tmp_path / "adapters")
    spec = engine_spec(
        "unified",
        tmp_path / "model",
        tmp_path_factory.mktemp("e") / "s",
        adapters=AdapterSlots(SLOTS, RANK, MODULES, EXPERT_RANK),
        dtype="bfloat16",
        tensor_parallel=ranks,
        chunked_prefill_tokens=512,  # SGLang aligns 1,024 pairs of a token and an expert, or more, with other kernels
    )
    prompts = [(name, tokens(count, 7)) for count in (20, 150) for name in (None, *directories)]
    long = [(name, tokens(400, 8)) for name in ("all", "some", "attention-too", None)]
    with running_engine(fitted_to(spec, base), tmp_path / "cache") as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        unified = Unified(engine, directories, revisions, tmp_path)
        judge = Judge(tmp_path / "model", directories, tmp_path)
        cases = cases_of(prompts + long, 40)
        answers = [unified.ask(case) for case in cases]
        known = judge.references(cases, answers)
        check_medians(known, answers)
        check_nearest(known, answers)
        for seed in range(2):
            shuffled = random.Random(seed).sample(cases, len(cases))
            answers = unified.ask_together(shuffled)
            check_medians(judge.references(shuffled, answers), answers)


def check_medians(known: list[Case], answers: list[dict]) -> None:
    for case, answer in zip(known, answers, strict=True):
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        num_answer = len(case.reference["logprobs"])
        of_answer = median_distance(found[-num_answer:], case.reference["logprobs"])
        of_prompt = median_distance(found[1:-num_answer], case.reference["prompt_logprobs"][1:])
        print(f"{case.adapter} {case.name}: prompt {of_prompt:.4f}, answer {of_answer:.4f}")
        assert max(of_prompt, of_answer) <= 0.05, (case.adapter, case.name, of_prompt, of_answer)


def check_nearest(known: list[Case], answers: list[dict]) -> None:
    """Adapters that leave a prompt's log-probabilities as they are, as the one of zeros, are not told apart."""
    for case, answer in zip(known, answers, strict=True):
        found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(case.prompt_ids)]
        distances = {
            other.adapter: median_distance(found, other.reference["prompt_logprobs"][1:])
            for other in known
            if other.prompt_ids == case.prompt_ids and {case.adapter, other.adapter} != {None, "zero"}
        }
        own = distances.pop(case.adapter)
        assert own < 0.5 * min(distances.values()), (case.adapter, case.name, own, distances)


def median_distance(found: list[float], wanted: list[float]) -> float:
    return statistics.median(abs(f - w) for f, w in zip(found, wanted, strict=True))
