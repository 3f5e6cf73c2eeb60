"""A slot is filled SGLang's way once per adapter, from its image after that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.hooks import memory_pool, slots


class Pool:
    """What the hook needs of SGLang's memory pool."""

    def __init__(self, names=("qkv_proj",)) -> None:
        self.A_buffer = {name: [torch.ones(3, 2, 4), torch.ones(3, 2, 4)] for name in names}
        self.B_buffer = {name: [torch.ones(3, 5, 2), torch.ones(3, 5, 2)] for name in names}
        self.filled = 0
        slots.make_slot_filler(self)

    def load(self, uid, buffer_id, adapter) -> None:
        """As `load_lora_weight_to_buffer`, through the recorded copy function."""
        self.filled += 1
        copy = slots.recorded_copies(lambda view, weight: view.copy_(weight))
        for buffers in (self.A_buffer, self.B_buffer):
            for each in buffers.values():
                for layer, buffer in enumerate(each):
                    if adapter is None:
                        buffer[buffer_id].zero_()
                    else:
                        copy(buffer[buffer_id], torch.full_like(buffer[buffer_id], adapter.layers[layer].weights["x"]))


def adapter(value: float) -> SimpleNamespace:
    layers = [SimpleNamespace(weights={"x": value + layer}, pinned_weights={}) for layer in range(2)]
    return SimpleNamespace(layers=layers, embedding_layers={})


def values(pool: Pool, slot: int) -> list[float]:
    return [float(buffer[slot].mean()) for part in (pool.A_buffer, pool.B_buffer) for buffer in part["qkv_proj"]]


def fill(pool: Pool, slot: int, own) -> None:
    slots.fill_slot(Pool.load, pool, "sha256:x", slot, own)


def test_the_second_time_it_comes_from_the_image():
    pool, first, second = Pool(), adapter(10), adapter(20)
    fill(pool, 0, first)
    fill(pool, 1, second)
    assert pool.filled == 2
    assert not first.layers[0].weights  # not held twice
    fill(pool, 0, second)
    fill(pool, 2, first)
    assert pool.filled == 2
    assert values(pool, 0) == [20, 21, 20, 21]
    assert values(pool, 2) == [10, 11, 10, 11]
    fill(pool, 2, None)
    assert values(pool, 2) == [0, 0, 0, 0]


@pytest.mark.parametrize("what", ["experts", "embeddings"])
def test_what_images_do_not_hold_is_filled_as_ever(what: str):
    pool = Pool(("qkv_proj", "down_proj_moe") if what == "experts" else ("qkv_proj",))
    own = adapter(10)
    if what == "embeddings":
        own.embedding_layers = {"embed_tokens": 1}
    fill(pool, 0, own)
    fill(pool, 1, own)
    assert pool.filled == 2
    assert values(pool, 1) == [10, 11, 10, 11]


def test_a_failure_is_not_recorded():
    pool, own = Pool(), adapter(10)

    def broken(*_):
        raise RuntimeError("no such module")

    with pytest.raises(RuntimeError):
        slots.fill_slot(broken, pool, "sha256:x", 0, own)
    assert slots._copies is None
    fill(pool, 0, own)
    assert values(pool, 0) == [10, 11, 10, 11]


@pytest.mark.parametrize(
    ("arguments", "backend", "environment", "words"),
    [
        ({"enable_lora_overlap_loading": True}, "csgmv", {}, "--enable-lora-overlap-loading cannot be used"),
        ({"enable_dp_attention": True}, "csgmv", {}, "--enable-dp-attention cannot be used"),
        ({"speculative_algorithm": "NGRAM"}, "csgmv", {}, "--speculative-algorithm cannot be used"),
        ({}, "triton", {}, "--lora-backend triton is not supported"),
        ({}, "csgmv", {"SGLANG_EXPERIMENTAL_LORA_OPTI": "1"}, "unset it"),
    ],
)
def test_settings_that_hooks_are_not_written_for_are_refused(arguments, backend, environment, words):
    with pytest.raises(ValueError, match=words):
        memory_pool.check_supported(SimpleNamespace(**arguments), backend, environment)


@pytest.mark.parametrize("backend", ["csgmv", "torch_native"])
def test_other_settings_are_not(backend: str):
    memory_pool.check_supported(SimpleNamespace(enable_dp_attention=False, speculative_algorithm=None), backend, {})
