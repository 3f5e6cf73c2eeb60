"""Which packed adapters a worker with a mixture of experts accepts."""

from __future__ import annotations

import json

import pytest

from adapters.errors import AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.packed import write_packed
from adapters.store.signing import Trust
from prefill_worker.residency import Acceptance
from samples.random_adapters import write_random_expert_lora, write_random_lora

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 150, "num_experts": 5,
    "moe_intermediate_size": 20,
}  # fmt: skip


@pytest.fixture
def base(tmp_path) -> BaseModel:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return BaseModel.read(tmp_path)


def prepare(base, source, tmp_path):
    adapter = read_adapter(source, base, Limits())
    (tmp_path / "resident").mkdir()
    write_packed(adapter, base, "bfloat16", tmp_path / "resident" / "packed.safetensors")
    acceptance = Acceptance(base, "bfloat16", Limits(), frozenset({"prefill"}), Trust.in_everybody())
    acceptance.prepare(revision_id_of(adapter), tmp_path / "resident" / "packed.safetensors")


@pytest.mark.parametrize("attention", [(), ("q_proj",)])
def test_experts_are_refused_with_a_reason(attention, base, tmp_path):
    source = write_random_expert_lora(tmp_path / "lora", base, 1, attention=attention, experts=[2])
    with pytest.raises(AdapterUnsupported, match="LoRA on experts, which is imported and packed, but not applied by"):
        prepare(base, source, tmp_path)
    assert not (tmp_path / "resident" / "adapter_config.json").exists()


def test_attention_is_taken(base, tmp_path):
    prepare(base, write_random_lora(tmp_path / "lora", base, 1, modules=["q_proj", "o_proj"]), tmp_path)
    config = json.loads((tmp_path / "resident" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
