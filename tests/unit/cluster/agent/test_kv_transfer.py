"""Tensor parallel sizes of prefill and decode workers: which cannot exchange KV, and which cannot run a model."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters.configs import config_of

from adapters.model.base_model import BaseModel
from cluster.agent.engine_spec import engine_spec
from cluster.agent.kv_transfer import check_kv_transfers
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from engine.base_models import fitted_to
from engine.errors import BaseModelNotRun

BASE = BaseModel(
    architecture="LlamaForCausalLM", num_layers=2, hidden=96, intermediate=192,
    heads=24, kv_heads=8, head_dim=4, vocabulary=64,
)  # fmt: skip


def config(prefill: list[int], decode: list[int]) -> ClusterConfig:
    workers = {f"p{n}": {"role": "prefill", "tensor_parallel": size} for n, size in enumerate(prefill)}
    workers |= {f"d{n}": {"role": "decode", "tensor_parallel": size} for n, size in enumerate(decode)}
    return config_of(workers)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [([1], [1]), ([2], [1]), ([1], [2]), ([4, 2], [2]), ([2], [2, 4]), ([8], [1, 2, 4, 8]), ([1], [1, 4, 4])],
)
def test_sizes_that_work(prefill: list[int], decode: list[int]):
    check_kv_transfers(config(prefill, decode), BASE)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ([2], [3], ["p0 has tensor_parallel 2, and d0 3", "a multiple of the other"]),
        ([1, 6], [4], ["p1 has tensor_parallel 6, and d0 4"]),
        ([1], [2, 4], ["d1 4", "cut in 4, but d0 needs each rank's heads cut in 2", "the same tensor_parallel"]),
        ([2], [1, 4], ["d1 4", "cut in 2, but d0 needs each rank's heads uncut"]),
    ],
)
def test_sizes_that_do_not(prefill: list[int], decode: list[int], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        check_kv_transfers(config(prefill, decode), BASE)
    for word in words:
        assert word in str(caught.value)


def test_replicated_kv_heads_need_no_other_cut():
    """With 2 KV heads, decode engines of 2 and of 4 ranks both cut one rank's heads in two."""
    check_kv_transfers(config([1], [2, 4]), replace(BASE, kv_heads=2))


@pytest.mark.parametrize(
    ("size", "base", "words"),
    [
        (3, BASE, "8 KV heads"),
        (16, BASE, "does not divide the 24 attention heads"),
        (4, replace(BASE, heads=14, kv_heads=2), "does not divide the 14 attention heads"),
        (8, replace(BASE, intermediate=100), "does not divide the 100 intermediate rows"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(size: int, base: BaseModel, words: str):
    spec = engine_spec(config([size], [size]), "p0", Path("/scratch"))
    with pytest.raises(BaseModelNotRun, match=f"tensor_parallel is {size}.*{words}"):
        fitted_to(spec, base)
    fitted_to(replace(spec, device="cuda", tensor_parallel=2), base)  # CPUs need more: `test_base_models.py`
