"""The self-check finds what it is for: a packed form that computes something else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.adapters.random_adapters import (
    write_random_expert_lora,
    write_random_lora,
    write_random_mixed,
    write_random_reft,
)

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import MODULES
from adapters.model.footprint import slot_bytes
from adapters.model.serving import EngineDtype
from adapters.verification.self_check import Deployment, SelfCheck, check_adapter, compare_outputs

CASES = {
    "all": {},
    "q alone": {"modules": ["q_proj"]},
    "several ranks": {"rank_pattern": {"q_proj": 2, "up_proj": 13}},
    "some layers": {"modules": ["v_proj", "up_proj"], "layers": [1]},
    "rsLoRA, negative": {"use_rslora": True, "alpha": -3},
    "weak": {"std": 1e-3},
}


def assert_sound(source: Path, model_dir: Path, dtype: EngineDtype, reference: str) -> SelfCheck:
    check = check_adapter(source, model_dir, Deployment(dtype=dtype))
    assert check.problems == ()
    assert not check.changes_nothing
    assert check.model is not None
    assert check.model.reference == reference
    assert check.model.effect > 10 * check.model.error
    return check


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sound_adapters_pass(name, dtype, base, model_dir, tmp_path):
    source = write_random_lora(tmp_path / "lora", base, seed=1, **CASES[name])
    check = assert_sound(source, model_dir, dtype, "peft")
    assert check.footprint.files == (source / "adapter_model.safetensors").stat().st_size


REFT_CASES = {
    "direft": lambda folder, base: write_random_reft(folder, base, 1),
    "direft, its own scale, some layers": lambda folder, base: write_random_reft(
        folder, base, 1, scale=-2.0, layers=[1]
    ),
    "loreft": lambda folder, base: write_random_reft(folder, base, 1, kind="loreft", rank=7),
    "lora and reft": lambda folder, base: write_random_mixed(folder, base, 1),
}


@pytest.mark.parametrize("name", REFT_CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_reft_passes(name, dtype, base, model_dir, tmp_path):
    assert_sound(REFT_CASES[name](tmp_path / "reft", base), model_dir, dtype, "normal_form")


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, "peft"),
        ({"layers": [2]}, "peft"),
        # What peft would refuse, or change.
        ({"experts": [0, 1, 3]}, "normal_form"),
        ({"modules": ["gate_proj", "down_proj"]}, "normal_form"),
        ({"use_rslora": True, "alpha": -3}, "normal_form"),
        ({"rank_pattern": {"experts.1.up_proj": 2, "experts.1.w3": 2}}, "normal_form"),
    ],
)
def test_sound_experts_pass(options, reference, moe_base, moe_dir, tmp_path):
    """Rounding flips near ties of a router: the packed form runs with the experts that the reference chose."""
    source = write_random_expert_lora(tmp_path / "lora", moe_base, 1, **options)
    assert_sound(source, moe_dir, "bfloat16", reference)


@pytest.mark.parametrize("write", [write_random_lora, write_random_reft])
def test_a_zero_adapter_is_said_to_change_nothing(write, base, model_dir, tmp_path):
    check = check_adapter(write(tmp_path / "zero", base, seed=1, zero=True), model_dir, Deployment())
    assert check.problems == ()
    assert check.changes_nothing
    assert check.model is not None
    assert check.model.effect == 0


DAMAGE = {
    "a projection is dropped": lambda of: replace(of, lora={key: f for key, f in of.lora.items() if key[0] != 0}),
    "B is zero": lambda of: replace(of, lora={key: replace(f, b=0 * f.b) for key, f in of.lora.items()}),
    "the scale is applied twice": lambda of: replace(
        of, lora={key: replace(f, scale=2 * f.scale) for key, f in of.lora.items()}
    ),
    "layers are swapped": lambda of: replace(
        of, lora={({0: 1, 1: 0}.get(n, n), m): f for (n, m), f in of.lora.items()}
    ),
    "a layer of ReFT is dropped": lambda of: replace(of, reft={n: f for n, f in of.reft.items() if n != 1}),
    "the bias is dropped": lambda of: replace(of, reft={n: replace(f, bias=0 * f.bias) for n, f in of.reft.items()}),
    "A and B are swapped": lambda of: replace(of, reft={n: replace(f, a=f.b, b=f.a) for n, f in of.reft.items()}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_packed_form_that_computes_something_else_fails(name, base, limits, model_dir, tmp_path):
    source = write_random_mixed(tmp_path / "mixed", base, 1)
    adapter = read_adapter(source, base, limits)
    for dtype in ("float32", "bfloat16"):
        outputs = compare_outputs(model_dir, source, adapter, DAMAGE[name](adapter), dtype)
        assert outputs.error > outputs.tolerance


def test_problems_are_sentences(base, model_dir, tmp_path):
    source = write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj", "down_proj"])
    sound = check_adapter(source, model_dir, Deployment(dtype="float32"))
    assert sound.model is not None
    for changed, said in (
        ({"error": 1.0}, "differ from the reference by 1; at most"),
        ({"effect": 0.0, "error": 0.0}, "exactly the base model's"),
        ({"effect": np.nan}, "not finite"),
    ):
        [problem] = replace(sound, model=replace(sound.model, **changed)).problems
        assert said in problem
    assert "its factors are zero, but" in replace(sound, changes_nothing=True).problems[0]


def test_it_refuses_what_a_worker_refuses(base, model_dir, tmp_path):
    source = write_random_lora(tmp_path / "all", base, seed=1, config={"prelude": {"positions": "all"}})
    with pytest.raises(AdapterUnsupported, match="unified"):
        check_adapter(source, model_dir, Deployment(limits=Limits(serves_all_positions=False)))
    with pytest.raises(AdapterIncompatible, match="rank 8"):
        check_adapter(source, model_dir, Deployment(limits=Limits(max_rank=4)))


def test_without_weights_no_output_is_compared(base, tmp_path):
    from support.adapters.tiny_model import write_model_config

    source = write_random_lora(tmp_path / "lora", base, seed=1)
    check = check_adapter(source, write_model_config(tmp_path / "sizes"), Deployment())
    assert check.model is None
    assert "no weights" in check.model_skipped
    assert check.problems == ()


def test_slot_bytes_of_experts_are_those_of_sglangs_buffers(base, moe_base):
    """Per expert: gate_up A [2r, 32], B [2i, r]; down A [r, i], B [32, r]."""
    found, modules = moe_base.experts, ("q_proj",)
    assert found is not None
    per_rank = (2 * 32 + 2 * found.intermediate) + (found.intermediate + 32)
    experts = len(found.layers) * found.count * 4 * per_rank * 2
    without = slot_bytes(moe_base, 16, modules, "bfloat16")
    # Slots have attention's projections: qkv A [3r, 32], B [96, r]; o 48 -> 32; and ReFT's.
    of_all = slot_bytes(moe_base, 16, MODULES, "bfloat16")
    assert of_all == 3 * 16 * ((3 * 32 + 96) + (48 + 32) + (2 * 32 + 1)) * 2
    assert slot_bytes(moe_base, 16, modules, "bfloat16", 4) == without + experts
    assert slot_bytes(base, 16, modules, "bfloat16", 4) == slot_bytes(base, 16, modules, "bfloat16")


def test_slot_bytes_are_those_of_sglangs_buffers(base):
    """Per layer: qkv A [3r, 32], B [48+24+24, r]; o 48 -> 32; gate_up A [2r, 32], B [96, r]; down 48 -> 32."""
    per_rank = (3 * 32 + 96) + (48 + 32) + (2 * 32 + 96) + (48 + 32) + (2 * 32 + 1)  # the last for ReFT
    everything = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert slot_bytes(base, 16, everything, "bfloat16") == 3 * 16 * per_rank * 2
    assert (
        slot_bytes(base, 16, ("q_proj",), "float32") == 3 * 16 * (3 * 32 + 96 + 2 * 32 + 1) * 4
    )  # k and v come with it
