"""LoRA on experts reaches the slots as SGLang lays them out, on one rank and in shares on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapters.random_adapters import write_random_expert_lora
from support.adapters.serving_form import ServingForm

from adapters.errors import AdapterIncompatible, AdapterUnsupported
from adapters.formats import read_adapter
from adapters.formats.folder import Limits
from adapters.model.base_model import BaseModel, Experts
from adapters.packed import write_for_engine
from adapters.packed.fused_layout import EXPERT_PARTS_OF, PARTS_OF
from engine.adapter_slots.packed_adapters import PackedLoader
from engine.adapter_slots.slot_places import expert_share_of, share_of

SLOTS, RANK, EXPERT_RANK = 2, 6, 5
BASE = BaseModel(
    "Qwen3MoeForCausalLM", num_layers=2, hidden=12, intermediate=16, heads=2, kv_heads=2, head_dim=6, vocabulary=50,
    experts=Experts(4, 8, (0, 1)),
)  # fmt: skip
INTERMEDIATE = 8


def buffers_of(ranks: int = 1) -> dict[tuple[str, str, int], torch.Tensor]:
    """Shaped as in SGLang's pool, and full of an earlier adapter."""
    width = INTERMEDIATE // ranks
    size_out, size_in = BASE.shape_of("qkv_proj")
    shapes = {
        ("qkv_proj", "a"): (3 * RANK, size_in),
        ("qkv_proj", "b"): (size_out // ranks, RANK),
        ("gate_up_proj_moe", "a"): (4, 2 * EXPERT_RANK, BASE.hidden),
        ("gate_up_proj_moe", "b"): (4, 2 * width, EXPERT_RANK),
        ("down_proj_moe", "a"): (4, EXPERT_RANK, width),
        ("down_proj_moe", "b"): (4, BASE.hidden, EXPERT_RANK),
    }
    return {(*key, layer): torch.randn(SLOTS, *shape) for key, shape in shapes.items() for layer in range(2)}


class ExpertsOfARank:
    """What SGLang's wrapper of experts takes of one expert's A and B."""

    def __init__(self, ranks: int) -> None:
        self.width = INTERMEDIATE // ranks

    def slice_moe_lora_a_weights(self, a: torch.Tensor, rank: int, module: str) -> torch.Tensor:
        return a[..., rank * self.width : (rank + 1) * self.width] if module == "down_proj_moe" else a

    def slice_moe_lora_b_weights(self, b: torch.Tensor, rank: int, module: str) -> torch.Tensor:
        if module == "down_proj_moe":
            return b
        own = slice(rank * self.width, (rank + 1) * self.width)
        return torch.cat([part[own] for part in b.chunk(2)])


class AttentionOfARank:
    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def slice_lora_b_weights(self, b: torch.Tensor) -> torch.Tensor:
        parts = b.split([BASE.shape_of(part)[0] for part in PARTS_OF["qkv_proj"]])
        return torch.cat([part.chunk(self._ranks)[self._rank] for part in parts])

    def slice_lora_a_weights(self, a: torch.Tensor) -> torch.Tensor:
        return a


def loader_of(buffers, rank: int = 0, ranks: int = 1) -> PackedLoader:
    shares = None
    if ranks > 1:
        shares = {
            module: expert_share_of(
                ExpertsOfARank(ranks), module, rank, *BASE.expert_shape_of(module.removesuffix("_moe"))
            )
            for module in EXPERT_PARTS_OF
        }
        shares["qkv_proj"] = share_of(AttentionOfARank(rank, ranks), *BASE.shape_of("qkv_proj"))
    return PackedLoader(buffers, BASE, RANK, shares)


def packed(directory: Path, source: Path) -> Path:
    write_for_engine(read_adapter(source, BASE, Limits()), BASE, "float32", directory)
    return directory


def expected(form: ServingForm, module: str, layer: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole A and B of a layer's experts in a slot: up's A and B begin in the middle."""
    parts, wrapper = EXPERT_PARTS_OF[module], ExpertsOfARank(ranks)
    size_out, size_in = BASE.expert_shape_of(module.removesuffix("_moe"))
    a = torch.zeros(4, len(parts) * EXPERT_RANK, size_in)
    b = torch.zeros(4, size_out, EXPERT_RANK)
    for expert in range(4):
        for number, part in enumerate(parts):
            if (pair := form.experts.get((layer, expert, part))) is not None:
                own_a, own_b = pair
                begin = number * EXPERT_RANK
                a[expert, begin : begin + len(own_a)] = own_a
                begin = number * len(own_b)
                b[expert, begin : begin + len(own_b), : own_b.shape[1]] = own_b
    return (
        torch.stack([wrapper.slice_moe_lora_a_weights(each, rank, module) for each in a]),
        torch.stack([wrapper.slice_moe_lora_b_weights(each, rank, module) for each in b]),
    )


ADAPTERS = {
    "all experts, the largest rank": {"rank": EXPERT_RANK},
    "a lower rank": {"rank": 2},
    "some experts of one layer": {"experts": [0, 2, 3], "layers": [1], "rank": 3},
    "gate alone": {"modules": ["gate_proj"], "rank": 3},
    "up alone": {"modules": ["up_proj"], "rank": 3},
    "down alone, one expert": {"modules": ["down_proj"], "experts": [3]},
    "attention too": {"attention": ["q_proj"], "experts": [1, 2], "rank": 4},
    "ranks that differ": {"rank": 4, "rank_pattern": {"experts.1.up_proj": 1, "layers.0.mlp.experts.2.down_proj": 2}},
}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_slot_has_each_experts_matrices_and_zeros_elsewhere(tmp_path: Path, name: str, rank: int, ranks: int):
    source = write_random_expert_lora(tmp_path / "source", BASE, 1, **ADAPTERS[name])
    directory = packed(tmp_path / "engine", source)
    buffers, form = buffers_of(ranks), ServingForm.read(directory)
    others = {key: buffer[0].clone() for key, buffer in buffers.items()}
    loader = loader_of(buffers, rank, ranks)
    adapter = loader.load(directory, None)
    assert adapter.has_experts
    loader.filler.fill(1, adapter.image)
    for module in EXPERT_PARTS_OF:
        for layer in range(2):
            a, b = expected(form, module, layer, rank, ranks)
            assert torch.equal(buffers[module, "a", layer][1], a), (module, layer)
            assert torch.equal(buffers[module, "b", layer][1], b), (module, layer)
    assert bool(buffers["qkv_proj", "b", 0][1].any()) == (name == "attention too")
    assert all(torch.equal(buffer[0], others[key]) for key, buffer in buffers.items())


def test_the_staging_buffer_holds_one_layer_of_experts(tmp_path: Path):
    """An image of all layers can take gigabytes on a GPU beside the slots."""
    loader = loader_of(buffers_of())
    source = write_random_expert_lora(tmp_path / "source", BASE, 1, rank=EXPERT_RANK)
    adapter = loader.load(packed(tmp_path / "engine", source), None)
    assert len(loader.filler._staging) < len(adapter.image.data) / 2


def test_layouts_are_shared_and_few_are_kept(tmp_path: Path):
    loader = loader_of(buffers_of())
    regions = []
    for number, options in enumerate(
        ({"experts": [1]}, {"experts": [1]}, {"experts": [2]}, {"rank": 2, "experts": [1]})
    ):
        source = write_random_expert_lora(tmp_path / f"source-{number}", BASE, number, **options)
        regions.append(id(loader.load(packed(tmp_path / f"engine-{number}", source), None).image.regions))
    assert regions[0] == regions[1]
    assert len(set(regions)) == 3


def test_a_rank_beyond_the_slots_is_refused(tmp_path: Path):
    source = write_random_expert_lora(tmp_path / "source", BASE, 1, rank=EXPERT_RANK + 1)
    directory = packed(tmp_path / "engine", source)
    with pytest.raises(AdapterIncompatible, match=r"rank 6 on experts.*at most 5"):
        loader_of(buffers_of()).load(directory, None)
    attention_only = {key: buffer for key, buffer in buffers_of().items() if key[0] == "qkv_proj"}
    with pytest.raises(AdapterUnsupported, match="LoRA on experts"):
        loader_of(attention_only).load(directory, None)
