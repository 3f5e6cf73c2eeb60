import json

import pytest
from tiny_model import TINY, write_model_config

from adapters.base_model import MODULES, BaseModel, name_of_module
from adapters.errors import BaseModelInvalid

SIZES = {key: value for key, value in TINY.items() if key != "architectures"}


def test_sizes_and_shapes(tmp_path):
    base = BaseModel.read(write_model_config(tmp_path))
    assert (base.num_layers, base.hidden, base.heads, base.kv_heads, base.head_dim) == (3, 32, 4, 2, 12)
    assert base.shape_of("q_proj") == (48, 32)
    assert base.shape_of("k_proj") == base.shape_of("v_proj") == (24, 32)
    assert base.shape_of("o_proj") == (32, 48)
    assert base.shape_of("gate_proj") == base.shape_of("up_proj") == (48, 32)
    assert base.shape_of("down_proj") == (32, 48)
    assert base.shape_of("qkv_proj") == (96, 32)
    assert base.shape_of("gate_up_proj") == (96, 32)
    with pytest.raises(KeyError):
        base.shape_of("lm_head")


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_shapes_are_those_of_transformers(architecture, tmp_path):
    import torch
    import transformers

    base = BaseModel.read(write_model_config(tmp_path, architectures=[architecture]))
    config = transformers.AutoConfig.for_model(architecture.removesuffix("ForCausalLM").lower(), **SIZES)
    with torch.device("meta"):
        modules = dict(getattr(transformers, architecture)(config).named_modules())
    for layer in range(base.num_layers):
        for module in MODULES:
            assert tuple(modules[name_of_module(layer, module)].weight.shape) == base.shape_of(module)


@pytest.mark.parametrize(
    ("fields", "kv_heads", "head_dim"),
    [
        ({"head_dim": ..., "num_key_value_heads": ...}, 4, 8),
        ({"head_dim": None, "num_key_value_heads": None}, 4, 8),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": ..., "head_dim": None}, 8, 8),
        ({"architectures": ["Qwen2ForCausalLM"], "head_dim": ..., "num_key_value_heads": 1}, 1, 8),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": ...}, 2, 128),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 64}, 2, 64),
    ],
)
def test_what_config_json_leaves_out(tmp_path, fields, kv_heads, head_dim):
    base = BaseModel.read(write_model_config(tmp_path, **fields))
    assert (base.kv_heads, base.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_defaults_are_those_of_transformers(tmp_path, architecture):
    import transformers

    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))()
    silent = {"architectures": [architecture], "num_key_value_heads": ..., "head_dim": ...}
    base = BaseModel.read(write_model_config(tmp_path, hidden_size=4096, num_attention_heads=32, **silent))
    assert base.kv_heads == config.num_key_value_heads
    assert base.head_dim == (getattr(config, "head_dim", None) or 128)


def test_the_fingerprint_is_of_the_sizes_not_the_path(tmp_path):
    base = BaseModel.read(write_model_config(tmp_path / "a"))
    same = BaseModel.read(write_model_config(tmp_path / "b", rope_theta=3.0, torch_dtype="float16"))
    assert base == same
    assert base.fingerprint == same.fingerprint
    changes = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 151, "architectures": ["Qwen2ForCausalLM"],
    }  # fmt: skip
    others = {
        BaseModel.read(write_model_config(tmp_path / key, **{key: value})).fingerprint for key, value in changes.items()
    }
    assert len(others | {base.fingerprint}) == len(changes) + 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": ...}, "architectures is None"),
        ({"architectures": [7]}, "architectures"),
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"head_dim": ..., "hidden_size": 33}, "no multiple"),
    ],
)
def test_configurations_that_are_refused(tmp_path, fields, says):
    with pytest.raises(BaseModelInvalid, match=says):
        BaseModel.read(write_model_config(tmp_path, **fields))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", "[" * 100_000])
def test_files_that_are_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(BaseModelInvalid):
        BaseModel.read(tmp_path)


def test_no_file(tmp_path):
    with pytest.raises(BaseModelInvalid, match="must hold a config"):
        BaseModel.read(tmp_path / "absent")


def test_text_models_inside_other_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "text_config": {}}))
    with pytest.raises(BaseModelInvalid, match="hidden_size"):
        BaseModel.read(tmp_path)
