"""Which packed adapters a worker with a mixture of experts accepts."""

from __future__ import annotations

import json

import pytest
from support.adapters.held_adapters import TRUSTS_EVERYBODY, pack
from support.adapters.random_adapters import write_random_expert_lora
from support.adapters.tiny_model import TINY_QWEN3_MOE, write_model_config

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.formats import Limits
from adapters.model.base_model import BaseModel
from prefill_worker.residency import Acceptance


def prepare(tmp_path, limits=Limits(), **options) -> dict:
    """Prepare a LoRA on experts for an engine; what the engine is told."""
    base = BaseModel.read(write_model_config(tmp_path / "model", **TINY_QWEN3_MOE))
    revision_id, path = pack(base, write_random_expert_lora(tmp_path / "lora", base, 1, **options), tmp_path / "packed")
    acceptance = Acceptance(base, "float32", limits, frozenset({"prefill"}), TRUSTS_EVERYBODY)
    acceptance.prepare(revision_id, path)
    return json.loads((path.parent / "adapter_config.json").read_text())


def test_experts_are_taken_up_to_their_rank(tmp_path):
    with pytest.raises(AdapterUnsupported, match="LoRA on experts, which is imported and packed, but not applied by"):
        prepare(tmp_path, attention=["q_proj"], experts=[2])
    with pytest.raises(AdapterUnsupported, match="rank 5 on experts, and workers take at most 4"):
        prepare(tmp_path, Limits(max_expert_rank=4), rank=5)
    assert not (tmp_path / "packed" / "adapter_config.json").exists()
    config = prepare(tmp_path, Limits(max_expert_rank=4), rank=4, modules=["gate_proj"])
    assert (config["r"], config["target_modules"]) == (4, ["gate_proj", "up_proj"])


def test_experts_projections_are_limited_too(tmp_path):
    limits = Limits(max_expert_rank=4, target_modules=("q_proj", "gate_proj"))
    with pytest.raises(AdapterIncompatible, match=r"adapts down_proj_moe, this worker only gate_up_proj.*target_modul"):
        prepare(tmp_path, limits, modules=["down_proj"])
