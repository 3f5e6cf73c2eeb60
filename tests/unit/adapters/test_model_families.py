"""Families that are unlike Llama: sizes, adapters' tensor names, what is refused.

A Qwen3 or Gemma 3 in a multimodal checkpoint is served as text. GLM-4 keeps gate and up in one projection; of its
mixtures, and of gpt-oss, engines adapt no MLP.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.adapters.random_adapters import (
    write_random_expert_lora,
    write_random_lora,
    write_random_mixed,
    write_random_reft,
)
from support.adapters.tiny_model import TINY, write_model_config
from support.engines.model_families import make_family
from support.engines.model_sizes import GPT_OSS_20B

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported, BaseModelInvalid
from adapters.formats import Limits, read_adapter
from adapters.formats.safetensors_file import Encoded, encode, write_safetensors
from adapters.model.base_model import BaseModel, Experts, name_of_module
from adapters.model.footprint import expert_bytes
from adapters.model.manifest import revision_id_of
from adapters.verification.reference import load_model
from adapters.verification.self_check import Deployment, check_adapter
from cluster.local.memory_plan import ModelSizes, layer_weights
from training.errors import OptionInvalid
from training.runs.base import load_base

VL = "Qwen3VLForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"


VISION, GLM = ["qwen3_vl", "qwen3_vl_moe", "gemma3_vl"], ["glm4", "glm4_moe"]
GPT_OSS = ["gpt_oss", "gpt_oss_mxfp4"]


@pytest.fixture(scope="module", params=[*VISION, *GLM, *GPT_OSS])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families") / "model"
    make_family(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def vl(model_dir: Path) -> BaseModel:
    return BaseModel.read(model_dir)


def wrapped(directory: Path, **fields: Any) -> Path:
    text = {key: value for key, value in TINY.items() if key != "architectures"}
    own = {"architectures": [VL], "text_config": text | {"max_position_embeddings": 99}, **fields}
    return write_model_config(directory, **(dict.fromkeys(TINY, ...) | own))


def test_sizes_are_those_of_the_text(model_dir: Path, vl: BaseModel, tmp_path: Path):
    modules = dict(load_model(model_dir).named_modules())
    for layer in range(vl.num_layers):
        for module in vl.slot_modules():
            if vl.architecture == "Glm4ForCausalLM" and module in ("gate_proj", "up_proj"):
                module = "gate_up_proj"  # they are its rows
            assert tuple(modules[name_of_module(layer, module, vl.layers_name)].weight.shape) == vl.shape_of(module)
    state = load_model(model_dir).state_dict(keep_vars=True)
    loaded = {id(tensor): tensor.numel() for name, tensor in state.items() if "visual" not in name}
    sizes = ModelSizes.read(model_dir)
    # Of each layer 8 experts of three matrices of 64 by 64, which take 17/32 bytes and not 4.
    saved = 3 * 8 * 3 * 64 * 64 * (4 - 17 / 32) if vl.has_mxfp4 else 0
    assert (sizes.weight_bytes, sizes.dtype) == (4 * sum(loaded.values()) - saved, "float32")
    assert sizes.kv_bytes_per_token == 2 * 3 * 2 * (64 if "GptOss" in vl.architecture else 32) * 4
    assert sizes.max_context == vl.context_length == 2048


def test_fields_of_the_text(tmp_path: Path):
    plain = BaseModel.read(write_model_config(tmp_path / "text", architectures=["Qwen3ForCausalLM"]))
    inside = BaseModel.read(wrapped(tmp_path / "vl"))
    assert (inside.hidden, inside.head_dim, inside.vocabulary) == (plain.hidden, plain.head_dim, plain.vocabulary)
    assert inside.fingerprint != plain.fingerprint
    assert inside.context_length == 99
    assert ModelSizes.read(wrapped(tmp_path / "typed", text_config={**TINY, "dtype": "float16"})).dtype == "float16"


def test_what_gemma_checkpoints_leave_out(tmp_path: Path):
    import transformers

    config = transformers.Gemma3TextConfig()
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}  # all sizes in that of 4B
    base = BaseModel.read(wrapped(tmp_path, architectures=[GEMMA], text_config=text))
    assert (base.heads, base.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (base.head_dim, base.vocabulary) == (config.head_dim, config.vocab_size)
    assert base.context_length == config.max_position_embeddings


def test_what_mixtures_leave_out(tmp_path: Path):
    import transformers

    config = transformers.Qwen3VLMoeTextConfig(num_hidden_layers=1)
    text = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    wrapped(tmp_path, architectures=["Qwen3VLMoeForConditionalGeneration"], text_config={**text, "vocab_size": 9})
    base = BaseModel.read(tmp_path)
    assert (base.kv_heads, base.head_dim) == (config.num_key_value_heads, 8)
    assert base.experts == Experts(config.num_experts, config.moe_intermediate_size, (0,))


def test_what_gpt_oss_leaves_out(tmp_path: Path):
    import transformers

    config = transformers.GptOssConfig(num_hidden_layers=1)
    stated = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    fields = {**dict.fromkeys(TINY, ...), "architectures": ["GptOssForCausalLM"], **stated, "vocab_size": 9}
    base = BaseModel.read(write_model_config(tmp_path, **fields))
    assert (base.kv_heads, base.head_dim) == (config.num_key_value_heads, config.head_dim)
    assert base.experts == Experts(config.num_local_experts, 8, (0,))
    assert base.experts.per_token == config.num_experts_per_tok


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text_config": ...}, "text_config is None"),
        ({"text_config": [1]}, r"text_config is \[1\]"),
        ({"text_config": {"hidden_size": 4}}, "num_attention_heads is None"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, rf"'Qwen2_5_VLFor.*'\].*{VL}"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "'Gemma2ForCausalLM'.*Gemma3ForCausalLM"),
        ({"architectures": ["Gemma4ForConditionalGeneration"]}, "Gemma4ForConditionalGeneration"),
        ({"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}, "Qwen3OmniMoeForConditionalGeneration"),
    ],
)
def test_other_models_are_refused_by_name(fields: dict[str, Any], says: str, tmp_path: Path):
    with pytest.raises(BaseModelInvalid, match=says):
        BaseModel.read(wrapped(tmp_path, **fields))


@pytest.mark.parametrize("model_dir", VISION, indirect=True)
def test_lora_on_the_vision_tower_is_refused(model_dir: Path, vl: BaseModel, limits: Limits, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    get_peft_model(load_model(model_dir), LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterUnsupported, match=r"vis.*changes the vision tower.*exclude_modules=") as refused:
        read_adapter(tmp_path / "a", vl, limits)
    excluded = str(refused.value).split("exclude_modules='")[1].rstrip("'")
    without = LoraConfig(r=2, target_modules="all-linear", exclude_modules=excluded)
    get_peft_model(load_model(model_dir), without).save_pretrained(tmp_path / "b")
    assert len(read_adapter(tmp_path / "b", vl, limits).lora) == 3 * len(vl.slot_modules())


@pytest.mark.parametrize("model_dir", VISION, indirect=True)
def test_names_without_the_language_model(vl: BaseModel, base: BaseModel, limits: Limits, tmp_path: Path):
    """Trainers of the text alone write `model.layers`, and transformers before 4.52 `language_model.model.layers`.

    The other way round peft would drop the tensors.
    """
    modules = vl.slot_modules()
    inside = write_random_lora(tmp_path / "inside", vl, 1, modules=modules)
    earlier = write_random_lora(tmp_path / "earlier", vl, 1, modules=modules)
    names = {name.replace("model.language_model.", "language_model.model."): t for name, t in _tensors(earlier).items()}
    write_safetensors(earlier / "adapter_model.safetensors", names, {"format": "pt"})
    text = replace(vl, architecture="Qwen3ForCausalLM")
    alone = write_random_lora(tmp_path / "alone", text, 1, modules=modules)
    assert len({revision_id_of(read_adapter(each, vl, limits)) for each in (inside, earlier, alone)}) == 1
    both = {**_tensors(inside), **_tensors(alone)}
    write_safetensors(alone / "adapter_model.safetensors", both, {"format": "pt"})
    with pytest.raises(AdapterMalformed, match="are the same tensor"):
        read_adapter(alone, vl, limits)
    elsewhere = write_random_lora(tmp_path / "elsewhere", replace(base, architecture=VL), 1)
    with pytest.raises(AdapterIncompatible, match="inside a multimodal model, which the base model"):
        read_adapter(elsewhere, base, limits)


def _tensors(directory: Path) -> dict[str, Encoded]:
    stored = load_file(directory / "adapter_model.safetensors")
    return {name: encode(tensor, "float32") for name, tensor in stored.items()}


@pytest.mark.parametrize(
    ("write", "reference"),
    [
        (write_random_lora, "peft"),
        (write_random_reft, "normal_form"),
        (partial(write_random_reft, kind="loreft"), "normal_form"),
        (write_random_mixed, "normal_form"),
    ],
    ids=["lora", "direft", "loreft", "mixed"],
)
def test_adapters_are_verified(write, reference: str, model_dir: Path, vl: BaseModel, tmp_path: Path):
    modules = {"modules": vl.slot_modules()} if write in (write_random_lora, write_random_mixed) else {}
    check = check_adapter(write(tmp_path / "adapter", vl, 1, **modules), model_dir, Deployment())
    assert (check.problems, check.not_served) == ((), "")
    assert check.model is not None
    # peft finds no gate_proj in GLM-4's model.
    assert check.model.reference == ("normal_form" if vl.architecture == "Glm4ForCausalLM" else reference)
    assert check.model.effect > 10 * check.model.error


def test_it_is_not_trained(model_dir: Path):
    with pytest.raises(OptionInvalid, match="is served, but not trained here; train it with peft"):
        load_base(model_dir, "float32", "cpu")


def test_lora_on_experts_inside(tmp_path: Path):
    """In peft's wrappers and apart, each with another scale for one module by its full name."""
    from peft import LoraConfig, get_peft_model

    make_family("qwen3_vl_moe", tmp_path / "model")
    experts = "model.language_model.layers.1.mlp.experts"
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        exclude_modules=".*visual.*",
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        alpha_pattern={f"{experts}.gate_up_proj": 90},
        init_lora_weights=False,
    )
    get_peft_model(load_model(tmp_path / "model"), config).save_pretrained(tmp_path / "a")
    deployment = Deployment(Limits(max_expert_rank=2), "float32")
    check = check_adapter(tmp_path / "a", tmp_path / "model", deployment)
    assert (check.not_served, check.manifest.expert_rank, check.problems) == ("", 2, ())
    assert check.model is not None
    assert check.model.reference == "peft"
    base, alphas = BaseModel.read(tmp_path / "model"), {f"{experts}.3.up_proj": 90}
    apart = write_random_expert_lora(tmp_path / "b", base, 1, rank=2, alpha_pattern=alphas)
    check = check_adapter(apart, tmp_path / "model", deployment)
    assert check.problems == ()
    [entry] = [entry for entry in check.manifest.experts if entry.scale == 90 / 2]
    assert (entry.layer, entry.module, entry.experts) == (1, "up_proj", ((3, 3),))


@pytest.mark.parametrize("model_dir", [*GLM, *GPT_OSS], indirect=True)
def test_sizes_by_config_json_alone(model_dir: Path, vl: BaseModel, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    named = load_model(model_dir).named_parameters()
    matrices = sum(each.numel() for name, each in named if each.dim() > 1 and not name.endswith("bias"))
    saved = 3 * 8 * 3 * 64 * 64 * (4 - 17 / 32) if vl.has_mxfp4 else 0
    assert ModelSizes.read(tmp_path).weight_bytes == 4 * matrices - saved


def test_the_reference_unpacks_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On every host: transformers' own choice depends on what else is installed."""
    monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", lambda: False)
    for family in GPT_OSS:
        make_family(family, tmp_path / family)
    plain, unpacked = (load_model(tmp_path / family).state_dict() for family in GPT_OSS)
    assert plain.keys() == unpacked.keys()
    for name, tensor in plain.items():
        assert (tensor.dtype, unpacked[name].dtype) == (torch.float32, torch.float32), name
        assert torch.equal(tensor, unpacked[name]), name


@pytest.mark.parametrize(
    ("layers", "experts", "stored", "active"), [(24, 32, 13_761_264_768, 3.6e9), (36, 128, 65_248_815_744, 5.1e9)]
)
def test_sizes_of_gpt_oss(tmp_path: Path, layers: int, experts: int, stored: int, active: float):
    """20B and 120B: the bytes of the published weights, and by the model cards the parameters that are active."""
    config = {**GPT_OSS_20B, "num_hidden_layers": layers, "num_local_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ModelSizes.read(tmp_path)
    assert found.dtype == "bfloat16"
    assert found.weight_bytes == pytest.approx(stored, rel=0.003)
    assert found.kv_bytes_per_token == layers * 2 * 8 * 64 * 2
    base = found.base
    assert layer_weights(base, 4) + base.vocabulary * base.hidden == pytest.approx(active, rel=0.02)
    assert expert_bytes(base, 4, "bfloat16") == 0  # slots have none


def test_sizes_of_glm_4_5_air(tmp_path: Path):
    """By its model card 106 billion parameters, 12 of them active."""
    import transformers

    config = transformers.Glm4MoeConfig(architectures=["Glm4MoeForCausalLM"], head_dim=128, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    sizes = ModelSizes.read(tmp_path)
    assert sizes.base.experts is not None
    assert sizes.weight_bytes == pytest.approx(2 * 106e9, rel=0.01)
    assert layer_weights(sizes.base, sizes.base.experts.per_token) == pytest.approx(12e9, rel=0.1)
    assert sizes.kv_bytes_per_token == 2 * 46 * 8 * 128 * 2
    assert expert_bytes(sizes.base, 4, "bfloat16") == 0  # slots have none


@pytest.mark.parametrize("model_dir", ["glm4"], indirect=True)
def test_parts_of_the_fused_projection_are_its_rows(model_dir: Path, vl: BaseModel, limits: Limits, tmp_path: Path):
    """Under separate names, which peft does not find in the model, the same adapter computes the same."""
    fused = write_random_lora(tmp_path / "fused", vl, 1, modules=("gate_up_proj",))
    adapter = read_adapter(fused, vl, limits)
    parts: dict[str, Encoded] = {}
    for (layer, module), factors in adapter.lora.items():
        for factor, values in (("A", factors.a), ("B", factors.b)):
            name = f"base_model.model.model.layers.{layer}.mlp.{module}.lora_{factor}.weight"
            parts[name] = encode(values, "float32")
    apart = write_random_lora(tmp_path / "apart", vl, 2, modules=("gate_proj", "up_proj"))
    write_safetensors(apart / "adapter_model.safetensors", parts, {"format": "pt"})
    assert revision_id_of(read_adapter(apart, vl, limits)) == revision_id_of(adapter)
    checks = [check_adapter(each, model_dir, Deployment(dtype="float32")) for each in (fused, apart)]
    assert [each.problems for each in checks] == [(), ()]
    found = [each.model for each in checks]
    (reference, effect), (other, same) = [(each.reference, each.effect) for each in found if each is not None]
    assert (reference, other) == ("peft", "normal_form")
    assert same == pytest.approx(effect, abs=1e-4)


@pytest.mark.parametrize(
    ("model_dir", "module"),
    [
        *(
            ("glm4_moe", each)
            for each in (
                "0.mlp.down_proj",
                "1.mlp.experts.2.up_proj",
                "1.mlp.experts",
                "1.mlp.shared_experts.gate_proj",
                "1.mlp.gate",
            )
        ),
        *(("gpt_oss", each) for each in ("1.mlp.experts.2.up_proj", "1.mlp.experts", "1.mlp.router")),
    ],
    indirect=["model_dir"],
)
def test_lora_outside_of_attention_is_refused(
    model_dir: Path, vl: BaseModel, limits: Limits, tmp_path: Path, module: str
):
    rows, columns = {"0.mlp.down_proj": (64, 160), "1.mlp.experts": (128, 64)}.get(module, (64, 64))
    count = 8 if module == "1.mlp.experts" else 1
    tensors = {
        f"base_model.model.model.layers.{module}.lora_A.weight": encode(np.ones((2 * count, columns)), "float32"),
        f"base_model.model.model.layers.{module}.lora_B.weight": encode(np.ones((rows, 2 * count)), "float32"),
    }
    targets = {"target_parameters": ["mlp.experts.gate_up_proj"]} if count > 1 else {}
    directory = write_random_lora(tmp_path, vl, 1, target_modules="all-linear", rank=2, config=targets)
    write_safetensors(directory / "adapter_model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(AdapterUnsupported, match="q_proj"):
        read_adapter(directory, vl, limits)
