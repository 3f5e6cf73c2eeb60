"""Both families of mixtures, with LoRA on experts and every other kind of adapter, alone and in mixed batches."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from support.engines.model_families import make_family
from support.engines.parity import Case
from support.engines.running_engine import DEVICE, MODULES, AdapterSlots, engine_spec, running_engine
from support.engines.unified_engine import Unified, check, tokens

from adapters.model.base_model import BaseModel
from engine.base_models import fitted_to
from samples.random_adapters import (
    write_random_expert_lora,
    write_random_lora,
    write_random_mixed,
    write_random_reft,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="LoRA on experts has been run on CPU engines only")

SLOTS, RANK, EXPERT_RANK = 2, 16, 8  # fewer slots than adapters: each is filled many times, after larger adapters
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


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_moe", 2), ("mixtral", 1)])
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
        for seed in range(2):
            shuffled = random.Random(seed).sample(cases, len(cases))
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
