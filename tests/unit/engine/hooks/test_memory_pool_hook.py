"""Settings that the adapter hooks do not support are refused at start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.hooks import memory_pool
from engine.hooks.memory_pool import EXPERT_RANK_VARIABLE


def settings(**fields) -> SimpleNamespace:
    """SGLang's, with nothing on that the hooks refuse."""
    off = dict.fromkeys((*memory_pool._UNSUPPORTED, *memory_pool._UNSUPPORTED_WITH_EXPERTS))
    one = dict.fromkeys((*memory_pool._UNSUPPORTED_ABOVE_1, *memory_pool._UNSUPPORTED_ABOVE_1_WITH_EXPERTS), 1)
    return SimpleNamespace(**{**off, **one, **fields})


@pytest.mark.parametrize(
    ("arguments", "backend", "environment", "words"),
    [
        ({"enable_lora_overlap_loading": True}, "csgmv", {}, "--enable-lora-overlap-loading cannot be used"),
        ({"dp_size": 2}, "csgmv", {}, "--dp-size above 1 cannot be used"),
        ({"attn_dp_size": 2}, "csgmv", {}, "--attn-dp-size above 1 cannot be used"),
        ({"enable_two_batch_overlap": True}, "csgmv", {}, "--enable-two-batch-overlap cannot be used"),
        ({"flashinfer_allreduce_fusion_backend": "auto"}, "csgmv", {}, "--flashinfer-allreduce-fusion-backend cannot"),
        ({"enable_aiter_allreduce_fusion": True}, "csgmv", {}, "--enable-aiter-allreduce-fusion cannot be used"),
        ({"enable_attn_tp_input_scattered": True}, "csgmv", {}, "--enable-attn-tp-input-scattered cannot be used"),
        ({"moe_a2a_backend": "deepep"}, "csgmv", {}, "--moe-a2a-backend cannot be used"),
        ({"moe_dense_tp_size": 1}, "csgmv", {}, "--moe-dense-tp-size cannot be used"),
        ({"dwdp_size": 2}, "csgmv", {}, "--dwdp-size above 1 cannot be used"),
        ({"pp_size": 2}, "csgmv", {}, "--pp-size above 1 cannot be used"),
        ({"enable_pdmux": True}, "csgmv", {}, "--enable-pdmux cannot be used"),
        ({"speculative_algorithm": "NGRAM"}, "csgmv", {}, "--speculative-algorithm cannot be used"),
        ({"max_loaded_loras": 4}, "csgmv", {}, "--max-loaded-loras cannot be used"),
        ({"attn_cp_size": 2}, "csgmv", {}, "--attn-cp-size above 1 cannot be used"),
        ({"moe_dp_size": 2}, "csgmv", {}, "--moe-dp-size above 1 cannot be used"),
        ({"tokenizer_worker_num": 2}, "csgmv", {}, "--tokenizer-worker-num above 1 cannot be used"),
        ({}, "triton", {}, "--lora-backend triton is not supported"),
        ({}, "csgmv", {"SGLANG_EXPERIMENTAL_LORA_OPTI": "1"}, "unset it"),
    ],
)
def test_settings_that_hooks_are_not_written_for_are_refused(arguments, backend, environment, words):
    with pytest.raises(ValueError, match=words):
        memory_pool.check_supported(settings(**arguments), backend, environment)


@pytest.mark.parametrize("backend", ["csgmv", "torch_native"])
def test_other_settings_are_not(backend: str):
    memory_pool.check_supported(settings(enable_pdmux=False, moe_a2a_backend="none"), backend, {})


def test_settings_that_sglang_has_no_longer_are_not_taken_for_off():
    known = settings()
    del known.enable_pdmux
    with pytest.raises(AttributeError, match="enable_pdmux"):
        memory_pool.check_supported(known, "csgmv", {})


def with_experts(**arguments) -> SimpleNamespace:
    return settings(**{"device": "cpu", "init_expert_location": "trivial", **arguments})


def layer_of_experts(backend: str = "triton", **base) -> SimpleNamespace:
    runner = SimpleNamespace(value=backend, is_triton=lambda: backend == "triton")
    return SimpleNamespace(base_layer=SimpleNamespace(**base), _lora_runner_backend=runner)


@pytest.mark.parametrize(
    ("arguments", "layer", "words"),
    [
        ({"ep_size": 2}, {}, "--ep-size above 1 cannot be used"),
        ({"experts_shared_outer_loras": True}, {}, "--experts-shared-outer-loras cannot be used"),
        ({"lora_use_virtual_experts": True}, {}, "--lora-use-virtual-experts cannot be used"),
        ({"enable_eplb": True}, {}, "--enable-eplb cannot be used"),
        ({"init_expert_location": "a.json"}, {}, "--init-expert-location cannot be used"),
        ({"enable_fused_moe_sum_all_reduce": True}, {}, "--enable-fused-moe-sum-all-reduce cannot be used"),
        ({}, {"use_intel_amx_backend": True}, "AMX"),
        ({"device": "cuda"}, {"backend": "deep_gemm"}, "with deep_gemm here.*--moe-runner-backend triton"),
    ],
)
def test_settings_under_which_experts_would_be_wrong_are_refused(arguments, layer, words):
    for device in ("cpu", "cuda"):
        memory_pool.check_experts_supported(with_experts(device=device), [layer_of_experts()])
    with pytest.raises(ValueError, match=words):
        memory_pool.check_experts_supported(with_experts(**arguments), [layer_of_experts(), layer_of_experts(**layer)])


@pytest.mark.parametrize(("module", "rank"), [("gate_up_proj_moe", 3), ("down_proj_moe", 3), ("qkv_proj", 64)])
def test_experts_have_a_rank_of_their_own(monkeypatch, module: str, rank: int):
    monkeypatch.setenv(EXPERT_RANK_VARIABLE, "3")

    def shape(_module, _model, max_rank, layer):
        return max_rank, layer

    pool = SimpleNamespace(is_moe_module=lambda name: "moe" in name, get_lora_A_shape=shape, get_lora_B_shape=shape)
    made = []

    def original(_pool, model):
        made.extend(getattr(pool, f"get_lora_{factor}_shape")(module, model, 64, 2) for factor in "AB")

    memory_pool.room_for_experts(original, pool, None)
    assert made == [(rank, 2)] * 2


def test_without_the_variable_there_is_no_room_for_experts():
    assert memory_pool.expert_rank({}) == memory_pool.expert_rank({EXPERT_RANK_VARIABLE: "0"}) == 0
