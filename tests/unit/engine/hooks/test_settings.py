"""Settings under which answers would be wrong, cut or shared are refused at start."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.hooks import inspection
from engine.hooks import settings as module
from engine.hooks.settings import check_adapters, check_experts, check_role


class UnifiedRadixCache:
    """SGLang's, by its name; `tests/engine/test_prefix_cache_probing.py` has the real ones."""

    disable = False

    def checkpoint_into_tree(self) -> None: ...


UnifiedRadixCache.__module__ = "sglang.srt.mem_cache.unified_radix_cache"


class Inherits(UnifiedRadixCache):
    def evict(self) -> None: ...


class PublishesItself(UnifiedRadixCache):
    def checkpoint_into_tree(self) -> None: ...


class Another:
    disable = False


class Off(PublishesItself):
    disable = True


def settings(**fields: Any) -> SimpleNamespace:
    """SGLang's, with nothing on that is refused."""
    off = (module._REFUSED, module._SHARED_STORAGE, module._UNSUPPORTED, module._UNSUPPORTED_WITH_EXPERTS)
    one = (*module._UNSUPPORTED_ABOVE_1, *module._UNSUPPORTED_ABOVE_1_WITH_EXPERTS)
    names = {name: None for table in off for name in table} | dict.fromkeys(one, 1)
    return SimpleNamespace(**{**names, "device": "cpu", "init_expert_location": "trivial", **fields})


@pytest.mark.parametrize(
    ("role", "cache", "fields", "words"),
    [
        ("decode", UnifiedRadixCache(), {}, "remove --disaggregation-decode-enable-radix-cache"),
        ("unified", PublishesItself(), {}, "PublishesItself cannot be used on a unified worker"),
        ("unified", Another(), {}, "Another cannot be used on a unified worker"),
        ("prefill", UnifiedRadixCache(), {"enable_lmcache": True}, "--enable-lmcache cannot be used with adapters"),
        ("prefill", UnifiedRadixCache(), {"enable_flexkv": True}, "--enable-flexkv cannot be used"),
        ("unified", UnifiedRadixCache(), {"enable_unified_cache_external_linker": True}, "linker cannot be used"),
        ("unified", Inherits(), {"hicache_storage_backend": "file"}, "--hicache-storage-backend cannot be used"),
        ("prefill", Off(), {"radix_cache_backend": "own"}, "--radix-cache-backend cannot be used"),
        ("unified", Off(), {"allow_auto_truncate": True}, "--allow-auto-truncate .*; remove it from extra_arguments"),
        ("decode", Off(), {"enable_pd_role_switch": True}, "--enable-pd-role-switch cannot be used"),
        ("decode", Off(), {"speculative_algorithm": "NGRAM"}, "--speculative-algorithm cannot be used"),
        ("decode", Off(), {"enable_http2": True}, "--enable-http2 cannot be used"),
        ("prefill", Off(), {"grpc_port": 50051}, "--grpc-port cannot be used"),
    ],
)
def test_what_a_role_refuses(role: str, cache: Any, fields: dict[str, Any], words: str):
    check_role("stock", cache, settings(**fields))
    with pytest.raises(ValueError, match=words):
        check_role(role, cache, settings(**fields))


@pytest.mark.parametrize(
    ("role", "cache"),
    [
        ("decode", Off()),
        ("prefill", PublishesItself()),  # no answer's KV is ever in a prefill engine
        ("unified", UnifiedRadixCache()),
        ("unified", Inherits()),
        ("unified", Off()),
    ],
)
def test_other_caches_are_not_refused(role: str, cache: Any):
    check_role(role, cache, settings())


def test_an_engine_that_switches_may_be_told_so():
    check_role("prefill", UnifiedRadixCache(), settings(enable_pd_role_switch=True), switches=True)
    with pytest.raises(ValueError, match="a decode engine cannot have a prefix cache"):
        check_role("decode", UnifiedRadixCache(), settings(enable_pd_role_switch=True), switches=True)


def test_a_scheduler_with_a_wrong_cache_reports_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRELUDE_ENGINE_ROLE", "decode")
    monkeypatch.setattr(inspection, "report", lambda: pytest.fail("it reported"))
    monkeypatch.setattr(inspection, "ResolvedSettings", settings)
    scheduler = SimpleNamespace(tree_cache=UnifiedRadixCache(), tp_worker=SimpleNamespace(model_runner=None))
    with pytest.raises(ValueError, match="a decode engine cannot have a prefix cache"):
        inspection.report_scheduler({}, scheduler)


ON = (
    "enable_lora_overlap_loading", "enable_two_batch_overlap", "enable_aiter_allreduce_fusion", "enable_pdmux",
    "enable_attn_tp_input_scattered", "enable_layernorm_sp", "enable_dense_mlp_attn_tp", "enable_cp_tp_group_sharing",
    "enable_nvidia_megakernel",
)  # fmt: skip
ABOVE_1 = ("dp_size", "attn_dp_size", "pp_size", "attn_cp_size", "moe_dp_size", "dwdp_size", "tokenizer_worker_num")
VALUES = {
    "flashinfer_allreduce_fusion_backend": "auto", "moe_a2a_backend": "deepep", "moe_dense_tp_size": 1,
    "max_loaded_loras": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [*((name, True) for name in ON), *((name, 2) for name in ABOVE_1), *VALUES.items()]
)
def test_settings_that_adapters_do_not_work_under_are_refused(name: str, value: Any):
    above = " above 1" if name in ABOVE_1 else ""
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}{above} cannot be used with adapters"):
        check_adapters(settings(**{name: value}), "csgmv", {})


def test_other_settings_are_not():
    for backend in ("csgmv", "torch_native"):
        check_adapters(settings(enable_pdmux=False, moe_a2a_backend="none"), backend, {})
    with pytest.raises(ValueError, match="--lora-backend triton is not supported"):
        check_adapters(settings(), "triton", {})
    with pytest.raises(ValueError, match="unset it"):
        check_adapters(settings(), "csgmv", {"SGLANG_EXPERIMENTAL_LORA_OPTI": "1"})


def test_settings_that_sglang_has_no_longer_are_not_taken_for_off():
    known = settings()
    del known.enable_pdmux
    with pytest.raises(AttributeError, match="enable_pdmux"):
        check_adapters(known, "csgmv", {})


def layer_of_experts(backend: str = "triton", **base: Any) -> SimpleNamespace:
    runner = SimpleNamespace(value=backend, is_triton=lambda: backend == "triton")
    return SimpleNamespace(base_layer=SimpleNamespace(**base), _lora_runner_backend=runner)


@pytest.mark.parametrize(
    ("fields", "layer", "words"),
    [
        ({"ep_size": 2}, {}, "--ep-size above 1 cannot be used with LoRA on experts"),
        ({"experts_shared_outer_loras": True}, {}, "--experts-shared-outer-loras cannot be used"),
        ({"lora_use_virtual_experts": True}, {}, "--lora-use-virtual-experts cannot be used"),
        ({"enable_eplb": True}, {}, "--enable-eplb cannot be used"),
        ({"init_expert_location": "a.json"}, {}, "--init-expert-location cannot be used"),
        ({"enable_fused_moe_sum_all_reduce": True}, {}, "--enable-fused-moe-sum-all-reduce cannot be used"),
        ({}, {"use_intel_amx_backend": True}, "AMX"),
        ({"device": "cuda"}, {"backend": "deep_gemm"}, "with deep_gemm here.*--moe-runner-backend triton"),
    ],
)
def test_settings_under_which_experts_would_be_wrong_are_refused(fields: dict, layer: dict, words: str):
    for device in ("cpu", "cuda"):
        check_experts(settings(device=device), [layer_of_experts()])
    with pytest.raises(ValueError, match=words):
        check_experts(settings(**fields), [layer_of_experts(), layer_of_experts(**layer)])
