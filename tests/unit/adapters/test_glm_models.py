"""GLM-4, which keeps gate and up in one projection, and its mixtures, whose MLPs engines do not adapt."""

from pathlib import Path

import numpy as np
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.engines.model_families import make_family

from adapters.errors import AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.formats.safetensors_file import Encoded, encode, write_safetensors
from adapters.model.base_model import ATTENTION_MODULES, BaseModel
from adapters.model.footprint import expert_bytes
from adapters.model.manifest import revision_id_of
from adapters.verification.reference import load_model
from adapters.verification.self_check import Deployment, check_adapter
from cluster.local.memory_plan import ModelSizes, layer_weights
from training.errors import OptionInvalid
from training.runs.base import load_base

FUSED = (*ATTENTION_MODULES, "gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("glm")
    for family in ("glm4", "glm4_moe"):
        make_family(family, root / family)
    return {family: root / family for family in ("glm4", "glm4_moe")}


@pytest.mark.parametrize("family", ["glm4", "glm4_moe"])
def test_sizes(models: dict[str, Path], family: str, tmp_path: Path):
    model = load_model(models[family])
    sizes = ModelSizes.read(models[family])
    assert sizes.weight_bytes == 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    assert sizes.kv_bytes_per_token == 2 * 3 * 2 * 32 * 4
    (tmp_path / "config.json").write_bytes((models[family] / "config.json").read_bytes())
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert ModelSizes.read(tmp_path).weight_bytes == 4 * matrices  # from config.json alone


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


def test_adapters_are_verified(models: dict[str, Path], tmp_path: Path):
    dense, mixture = BaseModel.read(models["glm4"]), BaseModel.read(models["glm4_moe"])
    adapters = {
        ("glm4", "peft"): write_random_lora(tmp_path / "fused", dense, 1, modules=FUSED),
        ("glm4", "normal_form"): write_random_mixed(tmp_path / "mixed", dense, 2, modules=("up_proj", "down_proj")),
        ("glm4_moe", "peft"): write_random_lora(tmp_path / "attention", mixture, 3, modules=ATTENTION_MODULES),
        ("glm4_moe", "normal_form"): write_random_reft(tmp_path / "reft", mixture, 4),
    }
    for (family, reference), directory in adapters.items():
        check = check_adapter(directory, models[family], Deployment(dtype="float32"))
        assert (check.problems, check.not_served) == ((), "")
        assert check.model is not None
        assert (check.model.reference, check.model.effect > 10 * check.model.error) == (reference, True)


def test_parts_of_the_fused_projection_are_its_rows(models: dict[str, Path], limits: Limits, tmp_path: Path):
    """Under separate names, which peft does not find in the model, the same adapter computes the same."""
    base = BaseModel.read(models["glm4"])
    fused = write_random_lora(tmp_path / "fused", base, 1, modules=("gate_up_proj",))
    adapter = read_adapter(fused, base, limits)
    parts: dict[str, Encoded] = {}
    for (layer, module), factors in adapter.lora.items():
        for factor, values in (("A", factors.a), ("B", factors.b)):
            name = f"base_model.model.model.layers.{layer}.mlp.{module}.lora_{factor}.weight"
            parts[name] = encode(values, "float32")
    apart = write_random_lora(tmp_path / "apart", base, 2, modules=("gate_proj", "up_proj"))
    write_safetensors(apart / "adapter_model.safetensors", parts, {"format": "pt"})
    assert revision_id_of(read_adapter(apart, base, limits)) == revision_id_of(adapter)
    checks = [check_adapter(each, models["glm4"], Deployment(dtype="float32")).model for each in (fused, apart)]
    (reference, effect), (other, same) = [(each.reference, each.effect) for each in checks if each is not None]
    assert (reference, other) == ("peft", "normal_form")
    assert same == pytest.approx(effect, abs=1e-4)


@pytest.mark.parametrize(
    "module",
    ["0.mlp.down_proj", "1.mlp.experts.2.up_proj", "1.mlp.experts", "1.mlp.shared_experts.gate_proj", "1.mlp.gate"],
)
def test_lora_outside_of_attention_is_refused(models: dict[str, Path], limits: Limits, tmp_path: Path, module: str):
    base = BaseModel.read(models["glm4_moe"])
    rows, columns = {"0.mlp.down_proj": (64, 160), "1.mlp.experts": (128, 64)}.get(module, (64, 64))
    count = 8 if module == "1.mlp.experts" else 1
    tensors = {
        f"base_model.model.model.layers.{module}.lora_A.weight": encode(np.ones((2 * count, columns)), "float32"),
        f"base_model.model.model.layers.{module}.lora_B.weight": encode(np.ones((rows, 2 * count)), "float32"),
    }
    targets = {"target_parameters": ["mlp.experts.gate_up_proj"]} if count > 1 else {}
    directory = write_random_lora(tmp_path, base, 1, target_modules="all-linear", rank=2, config=targets)
    write_safetensors(directory / "adapter_model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(AdapterUnsupported, match="q_proj"):
        read_adapter(directory, base, limits)


def test_they_are_not_trained(models: dict[str, Path]):
    for directory in models.values():
        with pytest.raises(OptionInvalid, match="is served, but not trained here; train it with peft"):
            load_base(directory, "float32", "cpu")
