import pytest
from support.adapters.tiny_model import TINY, TINY_MIXTURES, TINY_QWEN3_MOE, write_model_config

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import MODULES, BaseModel, Experts, name_of_experts, name_of_module

MODELS = {
    kind: TINY | {"architectures": [f"{kind.capitalize()}ForCausalLM"]}
    for kind in ("llama", "mistral", "qwen2", "qwen3")
}
GLM = {
    "glm4": TINY | {"architectures": ["Glm4ForCausalLM"], "pad_token_id": 0},
    "glm4_moe": TINY_QWEN3_MOE | {"architectures": ["Glm4MoeForCausalLM"]},
}
KINDS = MODELS | TINY_MIXTURES | GLM


@pytest.mark.parametrize(
    ("fields", "kv_heads", "head_dim"),
    [
        ({"head_dim": None, "num_key_value_heads": ...}, 4, 8),
        ({"architectures": ["Qwen2ForCausalLM"], "head_dim": ..., "num_key_value_heads": 1}, 1, 8),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": ...}, 2, 128),
    ],
)
def test_what_config_json_leaves_out(tmp_path, fields, kv_heads, head_dim):
    base = BaseModel.read(write_model_config(tmp_path, **fields))
    assert (base.kv_heads, base.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers(tmp_path, kind):
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    silent = dict.fromkeys(
        (
            "num_local_experts", "num_key_value_heads", "head_dim", "moe_intermediate_size", "mlp_only_layers",
            "num_experts_per_tok", "norm_topk_prob",
        ), ...
    )  # fmt: skip
    sizes = {"hidden_size": 4096, "num_attention_heads": 32}
    base = BaseModel.read(write_model_config(tmp_path, **KINDS[kind] | sizes | silent))
    assert (base.kv_heads, base.head_dim) == (config.num_key_value_heads, getattr(config, "head_dim", None) or 128)
    if base.experts is not None:
        assert base.experts.count == config.num_local_experts
        assert base.experts.intermediate == getattr(config, "moe_intermediate_size", 48)
        assert base.experts.layers == tuple(range(getattr(config, "first_k_dense_replace", 0), 3))
        assert base.experts.per_token == config.num_experts_per_tok
        assert base.experts.shared == getattr(config, "n_shared_experts", 0)


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
        (TINY_QWEN3_MOE | {"num_local_experts": 0}, "num_experts is 0"),
        (TINY_QWEN3_MOE | {"num_local_experts": "5"}, "num_experts is '5'"),
        (TINY_QWEN3_MOE | {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        (TINY_QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (TINY_QWEN3_MOE | {"mlp_only_layers": "1"}, "mlp_only_layers is 1"),
        (TINY_QWEN3_MOE | {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (TINY_QWEN3_MOE | {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        (GLM["glm4_moe"] | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be 0 or a positive"),
        (GLM["glm4_moe"] | {"n_shared_experts": "1"}, "n_shared_experts is '1'; it must be 0 or a positive"),
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


def test_fingerprints_of_models_without_experts_are_what_they_were(tmp_path):
    """Stored revisions are for these."""
    assert {
        kind: BaseModel.read(write_model_config(tmp_path / kind, **fields)).fingerprint
        for kind, fields in MODELS.items()
    } == {
        "llama": "ffe758cb546cfe44",
        "mistral": "b7efa026b880b826",
        "qwen2": "ff79b0b9dc84da33",
        "qwen3": "01802974eb7dfd8d",
    }


def write_mixture(directory, kind="qwen3_moe", **fields):
    return BaseModel.read(write_model_config(directory, **TINY_MIXTURES[kind] | fields))


def test_experts_and_their_layers(tmp_path):
    base = write_mixture(tmp_path / "a")
    assert base.experts == Experts(count=5, intermediate=20, layers=(0, 2))
    assert base.modules_of(1) == MODULES
    assert "5 experts of 20 in 2 layers" in str(base)
    assert write_mixture(tmp_path / "b", mlp_only_layers=None, decoder_sparse_step=2).experts.layers == (1,)
    assert write_mixture(tmp_path / "c", "mixtral").experts == Experts(4, 48, (0, 1, 2))
    every = BaseModel.read(write_model_config(tmp_path / "e", **GLM["glm4_moe"], first_k_dense_replace=0)).experts
    assert every.layers == (0, 1, 2)
    assert BaseModel.read(write_model_config(tmp_path / "d")).experts is None
    with pytest.raises(KeyError):
        BaseModel.read(tmp_path / "d").expert_shape_of("gate_proj")


def test_both_spellings_of_the_number_of_experts(tmp_path):
    base = write_mixture(tmp_path / "a")
    assert write_mixture(tmp_path / "b", num_experts=5, num_local_experts=...) == base
    assert write_mixture(tmp_path / "c", num_experts=5) == base
    with pytest.raises(BaseModelInvalid, match="num_experts is 6, but num_local_experts 5"):
        write_mixture(tmp_path / "d", num_experts=6)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_those_of_transformers(kind, tmp_path):
    import torch
    import transformers

    fields = KINDS[kind]
    base = BaseModel.read(write_model_config(tmp_path, **fields))
    sizes = {key: value for key, value in fields.items() if key != "architectures"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    modules = dict(model.named_modules())
    for layer in range(base.num_layers):
        for module in base.modules_of(layer):
            if kind == "glm4" and module in ("gate_proj", "up_proj"):
                module = "gate_up_proj"  # they are its rows
            assert tuple(modules[name_of_module(layer, module)].weight.shape) == base.shape_of(module)
        assert (name_of_experts(layer) in modules) == base.has_experts(layer)
        if base.has_experts(layer):
            experts = modules[name_of_experts(layer)]
            assert experts.gate_up_proj.shape == (base.experts.count, *base.expert_shape_of("gate_up_proj"))
            assert experts.down_proj.shape == (base.experts.count, *base.expert_shape_of("down_proj"))


def test_the_fingerprint_is_of_the_experts_too(tmp_path):
    changes = [
        {}, {"num_local_experts": 6}, {"moe_intermediate_size": 24}, {"mlp_only_layers": [0]}, {"mlp_only_layers": []},
        {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["MixtralForCausalLM"]},
    ]  # fmt: skip
    found = {write_mixture(tmp_path / str(n), **change).fingerprint for n, change in enumerate(changes)}
    assert len(found) == len(changes)
    assert write_mixture(tmp_path / "same", norm_topk_prob=False).fingerprint in found
