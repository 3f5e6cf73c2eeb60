"""What slots of experts take, and what they do not; `tests/engine/test_experts.py` has what they compute."""

from pathlib import Path

import pytest
import torch
from support.adapters.random_adapters import write_random_expert_lora

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.formats import read_adapter
from adapters.formats.folder import Limits
from adapters.model.base_model import BaseModel, Experts
from adapters.packed import write_for_engine
from engine.adapter_slots.packed_adapters import PackedLoader

RANK, EXPERT_RANK = 6, 5
BASE = BaseModel(
    "Qwen3MoeForCausalLM", num_layers=2, hidden=12, intermediate=16, heads=2, kv_heads=2, head_dim=6, vocabulary=50,
    experts=Experts(4, 8, (0, 1)),
)  # fmt: skip


def loader_of(*modules: str) -> PackedLoader:
    """With buffers shaped as in SGLang's pool."""
    size_out, size_in = BASE.shape_of("qkv_proj")
    shapes = {
        ("qkv_proj", "a"): (3 * RANK, size_in),
        ("qkv_proj", "b"): (size_out, RANK),
        ("gate_up_proj_moe", "a"): (4, 2 * EXPERT_RANK, BASE.hidden),
        ("gate_up_proj_moe", "b"): (4, 16, EXPERT_RANK),
        ("down_proj_moe", "a"): (4, EXPERT_RANK, 8),
        ("down_proj_moe", "b"): (4, BASE.hidden, EXPERT_RANK),
    }
    buffers = {
        (*key, layer): torch.zeros(2, *shape)
        for key, shape in shapes.items()
        for layer in range(2)
        if key[0] in modules
    }
    return PackedLoader(buffers, BASE, RANK, None)


def packed(folder: Path, rank: int) -> Path:
    source = write_random_expert_lora(folder / "source", BASE, 1, rank=rank)
    write_for_engine(read_adapter(source, BASE, Limits()), BASE, "float32", folder / "engine")
    return folder / "engine"


def test_the_staging_buffer_holds_one_layer_of_experts(tmp_path: Path):
    """An image of all layers can take gigabytes on a GPU beside the slots."""
    loader = loader_of("qkv_proj", "gate_up_proj_moe", "down_proj_moe")
    adapter = loader.load(packed(tmp_path, EXPERT_RANK), None)
    assert len(loader.filler._staging) < len(adapter.image.data) / 2


def test_what_slots_have_no_room_for_is_refused(tmp_path: Path):
    directory = packed(tmp_path, EXPERT_RANK + 1)
    with pytest.raises(AdapterIncompatible, match=r"rank 6 on experts.*at most 5"):
        loader_of("qkv_proj", "gate_up_proj_moe", "down_proj_moe").load(directory, None)
    with pytest.raises(AdapterUnsupported, match="LoRA on experts"):
        loader_of("qkv_proj").load(directory, None)
