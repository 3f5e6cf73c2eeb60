"""LoRA on a mixture of experts: what is read is what peft computes, and what the file says."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.adapters.damaged_adapters import EXPERT_DAMAGES, Damage, assert_named, edit_config
from support.adapters.random_adapters import write_random_expert_lora
from support.adapters.reference_answers import answer, answer_from_directory
from support.adapters.tiny_model import TINY_MIXTURES, write_model_config

from adapters.errors import AdapterError, AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats import read_adapter
from adapters.formats.peft.names import expert_key
from adapters.model.base_model import MLP_MODULES, BaseModel
from adapters.model.manifest import Manifest, revision_id_of
from adapters.verification.reference import UNLIMITED, load_model, peft_adapted

PROMPT = [3, 141, 5, 92, 6, 53, 58, 97, 93, 2, 38, 4]


def spelled(base: BaseModel, module: str) -> str:
    return expert_key(base, 0, 0, module).rpartition(".")[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_factors_are_those_of_the_file(dtype, moe_base, tmp_path):
    gate, up = spelled(moe_base, "gate_proj"), spelled(moe_base, "up_proj")
    directory = write_random_expert_lora(
        tmp_path / "lora", moe_base, 1, attention=["q_proj"], dtype=dtype,
        rank_pattern={f"experts.2.{gate}": 3, "q_proj": 5}, alpha_pattern={up: 6, gate: 1},
    )  # fmt: skip
    adapter = read_adapter(directory, moe_base, UNLIMITED)
    places = set(product(moe_base.experts.layers, range(moe_base.experts.count), MLP_MODULES))
    assert adapter.experts.keys() == places
    assert adapter.lora.keys() == {(layer, "q_proj") for layer in range(3)}
    from safetensors.torch import load_file as load_torch

    stored = load_torch(directory / "adapter_model.safetensors")
    for (layer, expert, module), factors in adapter.experts.items():
        key = f"base_model.model.{expert_key(moe_base, layer, expert, module)}"
        assert np.array_equal(factors.a, stored[f"{key}.lora_A.weight"].float().numpy())
        assert np.array_equal(factors.b, stored[f"{key}.lora_B.weight"].float().numpy())
        rank = 3 if (expert, module) == (2, "gate_proj") else 4
        alpha = {"up_proj": 6, "gate_proj": 1}.get(module, 8)
        assert (factors.rank, factors.scale, factors.dtype) == (rank, alpha / rank, dtype)
        assert factors.stored_a.dtype.itemsize == {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
        assert not factors.stored_a.flags.writeable
    assert adapter.max_rank == 5
    assert adapter.kinds == ("lora",)


TARGETS = {
    "names": lambda name: [name("gate_proj"), name("up_proj"), name("down_proj")],
    "longer names": lambda name: [f"3.{name('gate_proj')}", name("up_proj"), name("down_proj"), name("gate_proj")],
    "all-linear": lambda name: "all-linear",
    "an expression": lambda name: rf".*\.experts\.\d+\.({name('gate_proj')}|{name('up_proj')}|{name('down_proj')})",
}


@pytest.mark.parametrize("name", TARGETS)
def test_ways_to_name_experts(name, moe_base, tmp_path):
    target_modules = TARGETS[name](lambda module: spelled(moe_base, module))
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"] if name == "all-linear" else []
    directory = write_random_expert_lora(
        tmp_path / "lora", moe_base, 1, target_modules=target_modules, attention=attention
    )
    adapter = read_adapter(directory, moe_base, UNLIMITED)
    assert len(adapter.experts) == len(moe_base.experts.layers) * moe_base.experts.count * 3


def test_full_names_of_single_experts(moe_base, tmp_path):
    keys = [expert_key(moe_base, 2, expert, "gate_proj") for expert in (0, 3)]
    options = {"modules": ["gate_proj"], "layers": [2], "experts": [0, 3]}
    directory = write_random_expert_lora(tmp_path / "lora", moe_base, 1, **options, target_modules=keys)
    assert len(read_adapter(directory, moe_base, UNLIMITED).experts) == 2
    edit_config(target_modules=[*keys, expert_key(moe_base, 2, 1, "gate_proj")])(directory)
    with pytest.raises(AdapterMalformed, match=r"names .*experts\.1\..*no tensors for it"):
        read_adapter(directory, moe_base, UNLIMITED)
    edit_config(target_modules=keys[:1])(directory)
    with pytest.raises(AdapterMalformed, match=r"tensors for .*experts\.3\..*does not name it"):
        read_adapter(directory, moe_base, UNLIMITED)


def answers_agree(ours, theirs) -> float:
    return max(abs(a - b) for a, b in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True))


def test_the_reference_is_peft_where_it_converts_experts(moe_base, moe_model, tmp_path):
    """peft puts the experts of these files together itself; our reading of them must compute the same."""
    directory = write_random_expert_lora(
        tmp_path / "lora", moe_base, 3, attention=["q_proj"], config={"lora_dropout": 0.1}
    )
    theirs = answer_from_directory(moe_model, directory, PROMPT, 3)
    ours = answer(moe_model, read_adapter(directory, moe_base, UNLIMITED), PROMPT, theirs.tokens)
    alone = answer(moe_model, None, PROMPT, theirs.tokens)
    assert (theirs.method, ours.method) == ("peft", "normal_form")
    assert answers_agree(ours, theirs) < 1e-4
    assert answers_agree(ours, alone) > 0.01


@pytest.fixture
def fresh_model(moe_dir):
    """A model of the test's own: peft's wrappers leave the parameters of experts in another order."""
    return load_model(moe_dir)


@pytest.fixture
def wrapped(fresh_model, tmp_path):
    """Has peft train a LoRA on parameters, with values everywhere, and save it; gives (directory, peft's weights)."""

    def make(**options):
        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        fields = {"r": 3, "lora_alpha": 7, "target_modules": []} | options
        peft_model = get_peft_model(fresh_model, LoraConfig(**fields))
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        peft_model.save_pretrained(tmp_path / "wrapped")
        deltas = {
            (int(name.split(".")[4]), module.parameter_name): module.get_delta_weight("default").detach().numpy()
            for name, module in peft_model.named_modules()
            if hasattr(module, "parameter_name")
        }
        peft_model.unload()
        if hasattr(fresh_model, "peft_config"):
            del fresh_model.peft_config
        return tmp_path / "wrapped", deltas

    return make


WRAPPED = {
    "gate and up": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "with attention": {"target_parameters": ["gate_up_proj", "down_proj"], "target_modules": ["q_proj", "v_proj"]},
    "one layer": {"target_parameters": ["layers.2.mlp.experts.down_proj", "gate_up_proj"]},
    "ranks and alphas": {
        "target_parameters": ["gate_up_proj", "down_proj"],
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {r".*\.gate_up_proj": 5},
        "use_rslora": True,
    },
    "no target_modules": {"target_parameters": ["gate_up_proj"], "target_modules": None},
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_peft_writes_for_parameters(name, moe_base, fresh_model, wrapped):
    directory, deltas = wrapped(**WRAPPED[name])
    adapter = read_adapter(directory, moe_base, UNLIMITED)
    assert_computes(adapter, deltas, moe_base)
    with peft_adapted(fresh_model, directory) as peft_model:
        assert peft_model is not None
    theirs = answer_from_directory(fresh_model, directory, PROMPT, 2)
    assert theirs.method == "peft"
    assert answers_agree(answer(fresh_model, adapter, PROMPT, theirs.tokens), theirs) < 1e-4


def test_wrappers_the_other_way_round(moe_base, moe_dir, fresh_model, wrapped):
    """After a LoRA on gate_up_proj alone has run, peft wraps the parameters of the same model in the other order."""
    directory, _ = wrapped(target_parameters=["gate_up_proj"])
    answer_from_directory(fresh_model, directory, PROMPT, 1)
    directory, deltas = wrapped(target_parameters=["gate_up_proj", "down_proj"])
    shapes = {name: tensor.shape for name, tensor in load_file(directory / "adapter_model.safetensors").items()}
    inner = shapes["base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"]
    assert inner[0] == moe_base.hidden  # down_proj's
    assert_computes(read_adapter(directory, moe_base, UNLIMITED), deltas, moe_base)
    assert answer_from_directory(load_model(moe_dir), directory, PROMPT, 1).method == "normal_form"


def assert_computes(adapter, deltas, moe_base):
    wanted = {}
    for (layer, parameter), delta in deltas.items():
        for expert in range(moe_base.experts.count):
            parts = ["down_proj"] if parameter == "down_proj" else ["gate_proj", "up_proj"]
            for part, own in zip(parts, np.split(delta[expert], len(parts)), strict=True):
                wanted[layer, expert, part] = own
    assert adapter.experts.keys() == wanted.keys()
    for place, factors in adapter.experts.items():
        ours = factors.scale * (factors.b.astype(np.float64) @ factors.a)
        assert np.abs(ours - wanted[place]).max() <= 1e-5 * max(1, np.abs(wanted[place]).max()), place


def test_what_peft_writes_for_modules_that_have_become_parameters(moe_base, wrapped):
    """peft 0.21 turns target_modules of experts into target_parameters, with a rank twice as large for gate and up."""
    names = [spelled(moe_base, module) for module in MLP_MODULES]
    directory, deltas = wrapped(target_modules=["q_proj", *names])
    adapter = read_adapter(directory, moe_base, UNLIMITED)
    assert {factors.rank for factors in adapter.experts.values()} == {3, 6}
    assert len(deltas) == 2 * len(moe_base.experts.layers)
    up = adapter.experts[0, 1, "up_proj"]
    half = deltas[0, "gate_up_proj"].shape[1] // 2
    assert np.abs(up.scale * (up.b @ up.a) - deltas[0, "gate_up_proj"][1, half:]).max() < 1e-5


def test_after_the_reference_the_model_is_what_it_was(moe_base, moe_model, tmp_path):
    before = {name: value.clone() for name, value in moe_model.state_dict().items()}
    addresses = {name: value.data_ptr() for name, value in moe_model.state_dict().items()}
    directory = write_random_expert_lora(tmp_path / "lora", moe_base, 3, use_rslora=True)
    first = answer_from_directory(moe_model, directory, PROMPT, 2)
    assert answer_from_directory(moe_model, directory, PROMPT, 2) == first
    for name, value in moe_model.state_dict().items():
        assert value.equal(before[name]), name
        assert value.data_ptr() == addresses[name]


@pytest.mark.parametrize("name", EXPERT_DAMAGES)
def test_each_damage_is_named(name, moe_base, limits, tmp_path):
    if moe_base.architecture == "MixtralForCausalLM" and name in ("an MLP where there are experts", "a layer without"):
        pytest.skip("every layer of Mixtral has experts")
    directory = write_random_expert_lora(tmp_path / "lora", moe_base, seed=0, attention=["q_proj"])
    assert_named(EXPERT_DAMAGES[name], directory, moe_base, limits)


def test_experts_of_a_model_without_any(base, moe_base, limits, tmp_path):
    directory = write_random_expert_lora(tmp_path / "lora", moe_base, seed=0)
    with pytest.raises(AdapterIncompatible, match=r"is for experts, which layer 0 of the base model .* has not"):
        read_adapter(directory, base, limits)


def naming(parameters: object, error: type[AdapterError], says: str) -> Damage:
    return Damage(edit_config(target_parameters=parameters), error, says)


WRAPPED_DAMAGES = {
    "parameters are not named": naming([], AdapterMalformed, "names nothing"),
    "one of two is named": naming(["experts.down_proj"], AdapterMalformed, "names down_proj of its experts"),
    "another parameter": naming(["gate_up_proj", "down_proj", "gate.weight"], AdapterUnsupported, "gate.weight"),
    "a string": naming("experts.down_proj", AdapterMalformed, "a list of names"),
    "numbers": naming([7], AdapterMalformed, "a list of names"),
}


@pytest.mark.parametrize("name", WRAPPED_DAMAGES)
def test_each_damage_of_wrapped_experts_is_named(name, moe_base, wrapped, limits):
    directory, _ = wrapped(target_parameters=["gate_up_proj", "down_proj"], target_modules=["q_proj"])
    assert_named(WRAPPED_DAMAGES[name], directory, moe_base, limits)


def test_wrapped_experts_without_tensors_or_twice(moe_base, wrapped, limits):
    directory, _ = wrapped(target_parameters=["gate_up_proj", "down_proj"])
    edit_config(r=2)(directory)
    with pytest.raises(AdapterMalformed, match="says 2 for each of"):
        read_adapter(directory, moe_base, limits)
    edit_config(r=3)(directory)
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if "base_layer" in name}, path)
    with pytest.raises(AdapterMalformed, match="target_parameters names down_proj of the experts, but there are no"):
        read_adapter(directory, moe_base, limits)
    one = {f"base_model.model.{expert_key(moe_base, 0, 1, 'up_proj')}.lora_{f}.weight": None for f in "AB"}
    rows, columns = moe_base.expert_shape_of("up_proj")
    factors = (np.ones((3, columns), np.float32), np.ones((rows, 3), np.float32))
    save_file(tensors | dict(zip(one, factors, strict=True)), path)
    edit_config(target_modules=[spelled(moe_base, "up_proj")])(directory)
    with pytest.raises(AdapterMalformed, match="up_proj of expert 1 twice"):
        read_adapter(directory, moe_base, limits)


def test_manifests_say_alike_experts_once(moe_base, tmp_path):
    gate = spelled(moe_base, "gate_proj")
    directory = write_random_expert_lora(tmp_path / "lora", moe_base, 1, rank_pattern={f"experts.1.{gate}": 2})
    adapter = read_adapter(directory, moe_base, UNLIMITED)
    manifest, last = Manifest.of(adapter), moe_base.experts.count - 1
    layers = moe_base.experts.layers
    assert len(manifest.experts) == 4 * len(layers)
    found = {(e.module, e.rank): e.experts for e in manifest.experts if e.layer == 0}
    assert found == {
        ("down_proj", 4): ((0, last),), ("gate_proj", 2): ((1, 1),), ("gate_proj", 4): ((0, 0), (2, last)),
        ("up_proj", 4): ((0, last),),
    }  # fmt: skip
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.target_modules == ("experts.down_proj", "experts.gate_proj", "experts.up_proj")
    assert (manifest.layers, manifest.max_rank) == (layers, 4)
    assert manifest.num_parameters == sum(f.stored_a.size + f.stored_b.size for f in adapter.experts.values())


def test_every_expert_counts_for_the_revision(moe_base, tmp_path):
    def revision(seed=1, **options):
        directory = write_random_expert_lora(tmp_path / str(time.monotonic_ns()), moe_base, seed, **options)
        return revision_id_of(read_adapter(directory, moe_base, UNLIMITED))

    assert revision() == revision()
    assert revision(dtype="bfloat16") != revision()
    same_values = {"zero": True, "modules": ["up_proj"], "layers": [2]}
    others = [revision(**same_values, experts=experts) for experts in ([0], [1], [0, 1])]
    assert len({*others, revision(), revision(2), revision(alpha=4)}) == 6
    adapter = read_adapter(write_random_expert_lora(tmp_path / "lora", moe_base, 1), moe_base, UNLIMITED)
    place = (2, 1, "up_proj")
    factors = adapter.experts[place]
    for change in ({"stored_a": factors.stored_a * 2}, {"stored_b": factors.stored_b * 2}, {"scale": 0.5}):
        changed = replace(adapter, experts={**adapter.experts, place: replace(factors, **change)})
        assert revision_id_of(changed) != revision_id_of(adapter), change


@settings(max_examples=25)
@given(data=st.data())
def test_any_key_is_read_or_refused(data, tmp_path_factory):
    """Never a crash, whatever a key or a field is changed to."""
    folder = tmp_path_factory.mktemp("any")
    kind = data.draw(st.sampled_from(sorted(TINY_MIXTURES)))
    base = BaseModel.read(write_model_config(folder / "model", **TINY_MIXTURES[kind]))
    directory = write_random_expert_lora(folder / "lora", base, 0, experts=[0, 1], attention=["q_proj"])
    whole = len(read_adapter(directory, base, UNLIMITED).experts)
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    victim = data.draw(st.sampled_from(sorted(tensors)))
    piece = st.sampled_from(["experts", "0", "17", "gate", "w1", "mlp", "lora_A", "base_layer", "block_sparse_moe", ""])
    parts = victim.split(".")
    parts[data.draw(st.integers(0, len(parts) - 1))] = data.draw(piece)
    tensors[".".join(parts)] = tensors.pop(victim)
    save_file(tensors, path)
    if data.draw(st.booleans()):
        values = (
            st.none() | st.integers(-1, 3) | st.lists(st.sampled_from(["experts", "gate_up_proj", "down_proj", ""]))
        )
        edit_config(target_parameters=data.draw(values))(directory)
    with suppress(AdapterError):
        adapter = read_adapter(directory, base, UNLIMITED)
        assert ".".join(parts) == victim
        assert len(adapter.experts) == whole
        assert not json.loads((directory / "adapter_config.json").read_text()).get("target_parameters")
