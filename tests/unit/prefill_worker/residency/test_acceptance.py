"""Which packed adapters a worker with a mixture of experts accepts."""

from __future__ import annotations

import json

import pytest
from support.adapters.held_adapters import TRUSTS_EVERYBODY
from support.adapters.random_adapters import write_random_expert_lora

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.packed import write_packed
from prefill_worker.residency import Acceptance

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 150, "num_experts": 5,
    "moe_intermediate_size": 20,
}  # fmt: skip


@pytest.fixture
def base(tmp_path) -> BaseModel:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return BaseModel.read(tmp_path)


def prepare(base, source, tmp_path, limits=Limits()):
    adapter = read_adapter(source, base, Limits())
    (tmp_path / "resident").mkdir()
    write_packed(adapter, base, "bfloat16", tmp_path / "resident" / "packed.safetensors")
    acceptance = Acceptance(base, "bfloat16", limits, frozenset({"prefill"}), TRUSTS_EVERYBODY)
    acceptance.prepare(revision_id_of(adapter), tmp_path / "resident" / "packed.safetensors")


@pytest.mark.parametrize("attention", [(), ("q_proj",)])
def test_experts_are_refused_with_a_reason(attention, base, tmp_path):
    source = write_random_expert_lora(tmp_path / "lora", base, 1, attention=attention, experts=[2])
    with pytest.raises(AdapterUnsupported, match="LoRA on experts, which is imported and packed, but not applied by"):
        prepare(base, source, tmp_path)
    assert not (tmp_path / "resident" / "adapter_config.json").exists()


def test_experts_are_taken_up_to_their_rank(base, tmp_path):
    for name, rank in (("taken", 4), ("refused", 5)):
        (tmp_path / name).mkdir()
        source = write_random_expert_lora(tmp_path / name / "lora", base, 1, rank=rank, modules=["gate_proj"])
        if name == "taken":
            prepare(base, source, tmp_path / name, Limits(max_expert_rank=4))
            config = json.loads((tmp_path / name / "resident" / "adapter_config.json").read_text())
            assert (config["r"], config["target_modules"]) == (4, ["gate_proj", "up_proj"])
        else:
            with pytest.raises(AdapterUnsupported, match="rank 5 on experts, and workers take at most 4"):
                prepare(base, source, tmp_path / name, Limits(max_expert_rank=4))


def test_experts_projections_are_limited_too(base, tmp_path):
    source = write_random_expert_lora(tmp_path / "lora", base, 1, modules=["down_proj"])
    limits = Limits(max_expert_rank=4, target_modules=("q_proj", "gate_proj"))
    with pytest.raises(AdapterIncompatible, match=r"adapts down_proj_moe, this worker only gate_up_proj.*target_modul"):
        prepare(base, source, tmp_path, limits)
