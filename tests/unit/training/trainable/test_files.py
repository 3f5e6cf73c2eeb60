"""An adapter in training and its directory are one revision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training.training_models import plain_logprobs, scramble

from adapters.formats import Limits, read_adapter
from adapters.model.manifest import revision_id_of
from training.trainable.adapter import TrainableAdapter
from training.trainable.files import write_adapter
from training.trainable.spec import KINDS, AdapterSpec


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 12, "positions": "all"},  # 32/12 and 1/sqrt(12) are rounded
        {"rank": 7, "layers": (2, 0)},
        {"rank": 3, "modules": ("down_proj", "q_proj"), "layers": (1,), "alpha": 1.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "trained"])
def test_a_directory_reads_back_exactly(tiny, tmp_path: Path, kind, options: dict[str, Any], is_new: bool):
    """The revision id covers places, scales, positions and every bit of every value."""
    _, base = tiny("llama", torch.float32)
    if kind != "lora":
        options = {name: value for name, value in options.items() if name != "modules"}
    adapter = TrainableAdapter.create(AdapterSpec(kind, **options), base)
    if not is_new:
        scramble(adapter)
    write_adapter(adapter, tmp_path, base.name)
    assert {path.name for path in tmp_path.iterdir()} == (
        {"adapter_config.json", "adapter_model.safetensors"}
        if kind == "lora"
        else {"prelude_adapter.json", "adapter.safetensors"}
    )
    read, own = read_adapter(tmp_path, base, Limits()), adapter.normal_form()
    assert revision_id_of(read) == revision_id_of(own)
    assert {place: factors.scale for place, factors in read.lora.items()} == {
        (layer, module): adapter.spec.scale for layer, module, _ in adapter.lora()
    }
    for layer, factors in read.reft.items():
        assert np.array_equal(factors.b, own.reft[layer].b)
        assert factors.scale == adapter.spec.scale


def test_peft_reads_a_trained_lora(tiny, tmp_path: Path):
    from adapters.verification.reference import peft_adapted

    model, base = tiny("qwen3", torch.float32)
    adapter = scramble(TrainableAdapter.create(AdapterSpec("lora", rank=12, modules=("k_proj", "up_proj")), base))
    write_adapter(adapter, tmp_path, base.name)
    tokens = torch.tensor([[5, 9, 7, 11, 12]])
    with peft_adapted(model, tmp_path) as theirs:
        assert theirs is not None
        logprobs = theirs(input_ids=tokens).logits[0, 2:-1].log_softmax(dim=1)
        wrapped = theirs.get_submodule("base_model.model.model.layers.2.mlp.up_proj")
        [own] = [each for layer, module, each in adapter.lora() if (layer, module) == (2, "up_proj")]
        assert torch.equal(wrapped.lora_B["default"].weight, own.b)
        assert wrapped.scaling["default"] == own.scale == 32 / 12
    plain = plain_logprobs(model, adapter, [5, 9, 7], [11, 12], everywhere=True)  # what training is compared with
    torch.testing.assert_close(logprobs.gather(1, tokens[0, 3:, None]).squeeze(1), plain, atol=1e-5, rtol=1e-5)
