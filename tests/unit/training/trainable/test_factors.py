"""Factors: how they start, what they are rounded to, what they are outside of training."""

import math

import numpy as np
import pytest
import torch
from support.training.training_models import scramble

from adapters.formats.safetensors_file import float32_to_bfloat16
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.serving import scaled_lora_b, scaled_reft_b
from training.trainable.adapter import TrainableAdapter
from training.trainable.factors import Rotation, TrainableLoreft
from training.trainable.spec import KINDS, AdapterSpec


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.uint16).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 3, 12])
def test_training_computes_with_what_is_packed_for_engines(tiny, kind, rank: int):
    """Bit for bit, for scales that are no powers of two as well."""
    _, base = tiny("llama", torch.float32)
    adapter = scramble(TrainableAdapter.create(AdapterSpec(kind, rank=rank), base))
    packed = adapter.normal_form()
    for layer, module, lora in adapter.lora():
        served, normal = lora.served(torch.bfloat16), packed.lora[layer, module]
        assert np.array_equal(bits(served.a), float32_to_bfloat16(normal.a))
        assert np.array_equal(bits(served.b), float32_to_bfloat16(scaled_lora_b(normal)).T)
        assert np.array_equal(lora.served(torch.float32).b.detach().numpy(), scaled_lora_b(normal).T)
    for layer, reft in adapter.reft():
        served, normal_reft = reft.served(torch.bfloat16), packed.reft[layer]
        assert served.bias is not None
        assert np.array_equal(bits(served.a), float32_to_bfloat16(normal_reft.a))
        assert np.array_equal(bits(served.b), float32_to_bfloat16(scaled_reft_b(normal_reft)))
        assert np.array_equal(bits(served.bias), float32_to_bfloat16(normal_reft.bias))
        assert np.array_equal(reft.served(torch.float32).b.detach().numpy(), scaled_reft_b(normal_reft))


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_passes_gradients_to_the_masters(tiny, kind):
    _, base = tiny("llama", torch.float32)
    adapter = scramble(TrainableAdapter.create(AdapterSpec(kind, rank=4), base))
    for factors in [each[-1] for each in (*adapter.lora(), *adapter.reft())]:
        served = factors.served(torch.bfloat16)
        sum(part.float().sum() for part in served if part is not None).backward()
    for name, parameter in adapter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_scales_by_kind_and_rank():
    assert [AdapterSpec("lora", rank=rank).scale for rank in (1, 16, 32)] == [32, 2, 1]
    assert AdapterSpec("lora", rank=4, alpha=8.0).scale == 2
    for kind in ("direft", "loreft"):
        assert [AdapterSpec(kind, rank=rank).scale for rank in (1, 4)] == [1, 0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_how_an_adapter_starts(tiny, kind):
    _, base = tiny("llama", torch.float32)
    spec = AdapterSpec(kind, rank=5, layers=(0, 2))
    adapter = TrainableAdapter.create(spec, base, seed=3)
    state = torch.random.get_rng_state()
    same, other = (TrainableAdapter.create(spec, base, seed=seed) for seed in (3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    form = adapter.normal_form()
    assert revision_id_of(form) == revision_id_of(same.normal_form()) != revision_id_of(other.normal_form())
    assert Manifest.of(form).layers == (0, 2)
    assert Manifest.of(form).num_parameters == adapter.num_parameters
    for lora in form.lora.values():
        assert not lora.b.any()
        assert 0 < np.abs(lora.a).max() <= 1 / math.sqrt(lora.a.shape[1])  # as peft
    for reft in form.reft.values():
        assert not reft.a.any()
        assert not reft.bias.any()
        assert np.abs(reft.b @ reft.b.T - np.eye(5)).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rotation_is_what_it_was_made_of(dtype: torch.dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        start = torch.nn.init.orthogonal_(torch.empty(20, 6, dtype=dtype))
        assert (Rotation(start)() - start).abs().max() < 50 * torch.finfo(dtype).eps
    identity = torch.eye(20, 6, dtype=dtype)  # whose reflections LAPACK leaves out
    assert (Rotation(identity)() - identity).abs().max() < 50 * torch.finfo(dtype).eps


def test_weight_decay_does_not_destroy_a_rotation():
    torch.manual_seed(0)
    factors = TrainableLoreft(24, 4, 1.0, torch.float32)
    optimiser = torch.optim.AdamW(factors.parameters(), lr=0.1, weight_decay=0.5)
    before = factors.rotation().detach().clone()
    for _ in range(20):
        optimiser.zero_grad()
        factors.rotation().square()[0].sum().backward()
        optimiser.step()
    rotation = factors.rotation().detach()
    assert (rotation.T @ rotation - torch.eye(4)).abs().max() < 1e-5
    assert (rotation - before).abs().max() > 0.1
