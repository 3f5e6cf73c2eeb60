"""The self-check finds what it is for: a serving form that computes something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.model.footprint import slot_bytes
from adapters.packed import write_for_engine
from adapters.verification.self_check import Deployment, check_adapter, compare_factors, compare_outputs
from adapters.verification.serving_form import ServingForm
from samples.random_adapters import write_random_lora, write_random_mixed, write_random_reft

CASES = {
    "all": {},
    "q alone": {"modules": ["q_proj"]},
    "several ranks": {"rank_pattern": {"q_proj": 2, "up_proj": 13}},
    "some layers": {"modules": ["v_proj", "up_proj"], "layers": [1]},
    "rsLoRA, negative": {"use_rslora": True, "alpha": -3},
    "weak": {"std": 1e-3},
}


@pytest.fixture
def served(base, limits, tmp_path):
    """An adapter of two projections and its serving form in float32."""
    source = write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj", "down_proj"])
    adapter = read_adapter(source, base, limits)
    write_for_engine(adapter, base, "float32", tmp_path / "engine")
    return source, adapter, ServingForm.read(tmp_path / "engine")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sound_adapters_pass(name, dtype, base, model_dir, tmp_path):
    source = write_random_lora(tmp_path / "lora", base, seed=1, **CASES[name])
    check = check_adapter(source, model_dir, Deployment(dtype=dtype))
    assert check.problems == ()
    assert not check.factors.changes_nothing
    assert check.model is not None
    assert check.model.reference == "peft"
    assert check.model.effect > 10 * check.model.error
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
    check = check_adapter(REFT_CASES[name](tmp_path / "reft", base), model_dir, Deployment(dtype=dtype))
    assert check.problems == ()
    assert not check.factors.changes_nothing
    assert check.model is not None
    assert check.model.reference == "normal_form"
    assert check.model.effect > 10 * check.model.error


REFT_DAMAGE = {
    "a layer is dropped": lambda reft: {layer: parts for layer, parts in reft.items() if layer != 1},
    "the bias is dropped": lambda reft: {layer: (a, b, 0 * bias) for layer, (a, b, bias) in reft.items()},
    "A and B are swapped": lambda reft: {layer: (b, a, bias) for layer, (a, b, bias) in reft.items()},
    "the scale is forgotten": lambda reft: {layer: (a, 2 * b, bias) for layer, (a, b, bias) in reft.items()},
}


@pytest.mark.parametrize("name", REFT_DAMAGE)
def test_damaged_reft_fails(name, base, limits, model_dir, tmp_path):
    source = write_random_reft(tmp_path / "reft", base, 1)
    adapter = read_adapter(source, base, limits)
    write_for_engine(adapter, base, "bfloat16", tmp_path / "engine")
    form = ServingForm.read(tmp_path / "engine")
    damaged = replace(form, reft=REFT_DAMAGE[name](dict(form.reft)))
    assert compare_factors(adapter, damaged, 2**-6).largest_error > 2**-6
    outputs = compare_outputs(model_dir, source, adapter, damaged, "bfloat16")
    assert outputs.error > outputs.tolerance


def test_a_zero_adapter_is_said_to_change_nothing(base, model_dir, tmp_path):
    check = check_adapter(write_random_lora(tmp_path / "lora", base, seed=1, zero=True), model_dir, Deployment())
    assert check.problems == ()
    assert check.factors.changes_nothing
    assert check.model is not None
    assert check.model.effect == 0


DAMAGE = {
    "a projection is dropped": lambda lora: {name: pair for name, pair in lora.items() if "0.mlp" not in name},
    "everything is dropped": lambda lora: {},
    "B is zero": lambda lora: {name: (a, torch.zeros_like(b)) for name, (a, b) in lora.items()},
    "the scale is applied twice": lambda lora: {name: (a, 2 * b) for name, (a, b) in lora.items()},
    "ranks are mixed up": lambda lora: {name: (a.flip(0), b) for name, (a, b) in lora.items()},
    "layers are swapped": lambda lora: {name.translate(str.maketrans("01", "10")): pair for name, pair in lora.items()},
    "a sibling is not zero": lambda lora: (
        lora | {"model.layers.0.self_attn.k_proj": (torch.ones(8, 32), torch.ones(24, 8))}
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_serving_form_that_computes_something_else_fails(name, served, model_dir):
    source, adapter, form = served
    damaged = replace(form, lora=DAMAGE[name](dict(form.lora)))
    for tolerance in (1e-5, 2**-6):
        factors = compare_factors(adapter, damaged, tolerance)
        assert factors.largest_error > tolerance
    for dtype in ("float32", "bfloat16"):
        outputs = compare_outputs(model_dir, source, adapter, damaged, dtype)
        assert outputs.error > outputs.tolerance


def test_problems_are_sentences(served, model_dir, base):
    source, adapter, form = served
    sound = check_adapter(source, model_dir, Deployment(dtype="float32"))
    damaged = replace(form, lora=DAMAGE["B is zero"](form.lora))
    failed = replace(
        sound,
        factors=compare_factors(adapter, damaged, 1e-5),
        model=compare_outputs(model_dir, source, adapter, damaged, "float32"),
    )
    texts = " / ".join(failed.problems)
    assert "the serving form is 1 of the change away" in texts
    assert "differ from the reference by" in texts
    assert sound.model is not None
    silent = replace(sound, model=replace(sound.model, effect=0.0, error=0.0))
    assert "exactly the base model's" in silent.problems[0]
    wild = replace(sound, model=replace(sound.model, effect=float("nan")))
    assert "not finite" in wild.problems[0]


def test_an_unknown_tensor_in_the_serving_form_is_not_skipped(served, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "engine" / "packed.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | {"lora.lm_head.a": torch.zeros(1)}, path, metadata)
    with pytest.raises(ValueError, match="cannot apply"):
        ServingForm.read(tmp_path / "engine")


def test_it_refuses_what_a_worker_refuses(base, model_dir, tmp_path):
    source = write_random_lora(tmp_path / "all", base, seed=1, config={"prelude": {"positions": "all"}})
    with pytest.raises(AdapterUnsupported, match="unified"):
        check_adapter(source, model_dir, Deployment(limits=Limits(serves_all_positions=False)))
    with pytest.raises(AdapterIncompatible, match="rank 8"):
        check_adapter(source, model_dir, Deployment(limits=Limits(max_rank=4)))


def test_without_weights_only_factors_are_compared(base, tmp_path):
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
