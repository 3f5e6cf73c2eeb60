"""What the trainer packs on its device is, bit for bit, what an import of its checkpoint would have packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training.training_models import scramble, write_served

from adapters.model.manifest import Manifest
from adapters.model.serving import EngineDtype
from adapters.packed import read_packed, write_packed
from training.errors import AdapterUntrainable
from training.trainable.adapter import TrainableAdapter
from training.trainable.packed import served_weights
from training.trainable.spec import KINDS, AdapterSpec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 12, "positions": "all"},  # 32/12 and 1/sqrt(12) are rounded
        {"rank": 3, "modules": ("down_proj", "q_proj", "v_proj"), "layers": (2, 0)},  # parts of fused modules
    ],
    ids=str,
)
def test_it_is_what_an_import_packs(tiny, tmp_path: Path, kind, dtype: EngineDtype, options: dict[str, Any]):
    _, base = tiny("llama", torch.float32)
    if kind != "lora":
        options = {name: value for name, value in options.items() if name != "modules"}
    adapter = scramble(TrainableAdapter.create(AdapterSpec(kind, **options), base))
    weights = served_weights(adapter, getattr(torch, dtype))
    normal = adapter.normal_form()
    scramble(adapter)  # later steps change nothing
    write_served(weights, tmp_path / "own")
    write_packed(normal, base, dtype, tmp_path / "imported")
    own, imported = (read_packed(tmp_path / name) for name in ("own", "imported"))
    own.check_digest()
    own.check_fits(base)
    assert bytes(own.data) == bytes(imported.data)
    assert own.metadata.modules == imported.metadata.modules
    assert own.metadata.reft == imported.metadata.reft
    assert (own.metadata.positions, own.metadata.lora_rank) == (
        imported.metadata.positions,
        imported.metadata.lora_rank,
    )
    found, expected = (Manifest.from_json(each.metadata.manifest) for each in (own, imported))
    assert found.num_parameters == expected.num_parameters
    assert (found.layers, found.kinds, found.target_modules) == (
        expected.layers,
        expected.kinds,
        expected.target_modules,
    )
    assert {entry.scale for entry in (*found.lora, *found.reft)} == {1.0}  # it is in B
    assert not weights.changes_nothing


def test_other_weights_places_and_positions_are_other_revisions(tiny, tmp_path: Path):
    _, base = tiny("llama", torch.float32)

    def revision(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        torch.manual_seed(seed)
        adapter = scramble(TrainableAdapter.create(AdapterSpec("lora", rank=2, **options), base), seed)
        write_served(served_weights(adapter, dtype), tmp_path / "packed")
        return read_packed(tmp_path / "packed").metadata.revision_id

    found = [
        revision(1),
        revision(2),
        revision(1, torch.bfloat16),
        revision(1, positions="all"),
        revision(1, layers=(0,)),
        revision(1, layers=(1,)),
    ]
    assert len(set(found)) == len(found)
    assert revision(1) == found[0]


def test_untrained_lora_changes_nothing(tiny):
    _, base = tiny("llama", torch.float32)
    for kind in KINDS:
        adapter = TrainableAdapter.create(AdapterSpec(kind, rank=2), base)
        assert served_weights(adapter, torch.bfloat16).changes_nothing is (kind == "lora")


@pytest.mark.parametrize("value", [1e38, float("nan"), 1e5])
def test_values_that_do_not_fit_are_refused(tiny, value: float):
    _, base = tiny("llama", torch.float32)
    adapter = TrainableAdapter.create(AdapterSpec("lora", rank=2), base)
    with torch.no_grad():
        next(adapter.parameters())[0, 0] = value
    with pytest.raises(AdapterUntrainable, match="too large for float16"):
        served_weights(adapter, torch.float16)
