"""What we read from a PEFT directory is what peft itself computes with."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load_file
from support.adapters.damaged_adapters import edit_config
from support.adapters.random_adapters import ALL_FUSED, write_random_lora

from adapters.errors import AdapterMalformed
from adapters.formats import read_adapter
from adapters.formats.json_file import Fields
from adapters.formats.peft.config import PeftConfig
from adapters.model.base_model import FUSED_MODULES, MODULES, name_of_module
from adapters.verification.reference import peft_adapted

CONFIGURATIONS = {
    "all seven": {},
    "q and v": {"modules": ["q_proj", "v_proj"], "rank": 1},
    "up alone": {"modules": ["up_proj"], "alpha": 3},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "rsLoRA": {"use_rslora": True, "rank": 6},
    "some layers": {"layers": [0, 2]},
    "one layer": {"layers": [1], "config": {"layers_to_transform": 1}},
    "layers patterns": {"layers": [1, 2], "config": {"layers_pattern": ["h", "layers"]}},
    "all-linear": {"target_modules": "all-linear"},
    "expression": {"modules": ["q_proj", "up_proj"], "target_modules": r".*\.(q|up)_proj"},
    "longer names": {"modules": ["q_proj", "up_proj"], "target_modules": ["self_attn.q_proj", "mlp.up_proj"]},
    "full names": {"modules": ["q_proj"], "layers": [1], "target_modules": ["model.layers.1.self_attn.q_proj"],
                   "config": {"layers_to_transform": None}},
    "full name and layers": {"modules": ["q_proj"], "layers": [2], "config": {"layers_to_transform": [0]},
                             "target_modules": ["model.layers.2.self_attn.q_proj"]},
    "names the model lacks": {"modules": ["q_proj"], "target_modules": ["q_proj", "query_key_value", "c_attn"]},
    "excluded": {"modules": ["q_proj", "o_proj"], "target_modules": ["q_proj", "o_proj", "v_proj"],
                 "config": {"exclude_modules": ["v_proj"]}},
    "rank pattern": {"rank_pattern": {"q_proj": 2, "down_proj": 16}},
    "alpha pattern": {"alpha_pattern": {"q_proj": 1, "mlp.up_proj": 64}},
    "both patterns": {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 5.5}, "use_rslora": True},
    "full name pattern": {"rank_pattern": {"model.layers.1.self_attn.q_proj": 5, "q_proj": 2}},
    "first pattern wins": {"alpha_pattern": {r".*\.q_proj": 1, "q_proj": 2, "self_attn.v_proj": 5, "v_proj": 4}},
    "negative alpha": {"alpha": -4},
    "alpha 0": {"alpha": 0},
    "no default adapter": {"config": {"r": 4}, "rank_pattern": dict.fromkeys(MODULES, 8)},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_deltas_are_those_of_peft(name, model, base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=3, **CONFIGURATIONS[name])
    adapter = read_adapter(directory, base, limits)
    with peft_adapted(model, directory) as peft_model:
        assert peft_model is not None
        layers = {
            key.removeprefix("base_model.model."): module
            for key, module in peft_model.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        assert layers.keys() == {name_of_module(layer, module) for layer, module in adapter.lora}
        for (layer, module), factors in adapter.lora.items():
            expected = layers[name_of_module(layer, module)].get_delta_weight("default").numpy()
            ours = factors.scale * (factors.b.astype(np.float64) @ factors.a)
            assert np.abs(ours - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


def test_a_directory_that_peft_wrote(model, base, limits, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3, lora_alpha=7, target_modules="all-linear", rank_pattern={"q_proj": 2}, task_type="CAUSAL_LM"
    )
    peft_model = get_peft_model(model, config)
    for _, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    peft_model.save_pretrained(tmp_path / "lora")
    state = {key: value.clone() for key, value in peft_model.state_dict().items() if "lora_" in key}
    peft_model.unload()
    adapter = read_adapter(tmp_path / "lora", base, limits)
    assert len(adapter.lora) == 3 * 7
    for (layer, module), factors in adapter.lora.items():
        key = f"base_model.model.{name_of_module(layer, module)}"
        assert np.array_equal(factors.a, state[f"{key}.lora_A.default.weight"].numpy())
        assert np.array_equal(factors.b, state[f"{key}.lora_B.default.weight"].numpy())
        assert factors.scale == 7 / (2 if module == "q_proj" else 3)


def test_fused_names_are_split(base, limits, tmp_path):
    directory = write_random_lora(
        tmp_path / "lora", base, seed=4, modules=ALL_FUSED, alpha_pattern={"qkv_proj": 4}, rank=8
    )
    adapter = read_adapter(directory, base, limits)
    assert set(adapter.lora) == {(layer, module) for layer in range(3) for module in MODULES}
    q, k, v = (adapter.lora[0, module] for module in ("q_proj", "k_proj", "v_proj"))
    assert np.array_equal(q.a, k.a)
    assert np.array_equal(k.a, v.a)
    assert (q.b.shape[0], k.b.shape[0], v.b.shape[0]) == (48, 24, 24)
    stored = load_file(directory / "adapter_model.safetensors")
    for fused, parts in FUSED_MODULES.items():
        for layer in range(3):
            whole = stored[f"base_model.model.{name_of_module(layer, fused)}.lora_B.weight"]
            assert np.array_equal(np.concatenate([adapter.lora[layer, part].b for part in parts]), whole)
    assert q.scale == 0.5
    assert adapter.lora[0, "up_proj"].scale == 2


def test_a_fused_and_a_plain_projection_together(base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=4, modules=("qkv_proj", "q_proj"))
    with pytest.raises(AdapterMalformed, match="q_proj twice"):
        read_adapter(directory, base, limits)


def test_a_module_that_some_layers_lack(base, limits, tmp_path):
    """peft starts what is absent at zero, so it is the same adapter as one that never had it."""
    directory = write_random_lora(tmp_path / "lora", base, seed=4, modules=["q_proj"], layers=[0, 2])
    edit_config(layers_to_transform=None)(directory)
    assert set(read_adapter(directory, base, limits).lora) == {(0, "q_proj"), (2, "q_proj")}
    edit_config(layers_to_transform=[0, 1, 2])(directory)
    with pytest.raises(AdapterMalformed, match="layer 1, but there are no tensors"):
        read_adapter(directory, base, limits)


def test_absent_fields_take_pefts_defaults(base, limits, tmp_path):
    from peft import LoraConfig

    directory = write_random_lora(tmp_path / "lora", base, seed=4, rank=8)
    config = json.loads((directory / "adapter_config.json").read_text())
    kept = {key: config[key] for key in ("peft_type", "target_modules")}
    (directory / "adapter_config.json").write_text(json.dumps(kept))
    defaults = LoraConfig()
    factors = read_adapter(directory, base, limits).lora[0, "q_proj"]
    assert (factors.rank, factors.scale) == (defaults.r, defaults.lora_alpha / defaults.r)


KEYS = [name_of_module(layer, module) for layer in (0, 1, 11) for module in MODULES]


NAMES = ["q_proj", "self_attn.q_proj", "1.self_attn.q_proj", "mlp", "layers.1.mlp.up_proj", "up_proj", KEYS[0], KEYS[9]]


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["", r".*\."]), st.sampled_from(NAMES)).map("".join), st.integers(1, 9), max_size=9
    )
)
def test_alphas_are_those_of_peft(patterns):
    from peft.utils.other import get_pattern_key

    fields = {"peft_type": "LORA", "target_modules": ["x"], "alpha_pattern": patterns}
    config = PeftConfig.parse(Fields(fields, "test"))
    for key in KEYS:
        assert config.scale_of(key, 4) == patterns.get(get_pattern_key(patterns.keys(), key), 8) / 4
