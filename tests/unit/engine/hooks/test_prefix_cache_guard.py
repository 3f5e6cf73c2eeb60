"""Arguments under which KV would cross adapters or tenants, or prompts would be cut, are refused at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.hooks.guards.prefix_cache import check_entrances, check_prefix_cache, check_whole_prompts


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
    off = {"enable_lmcache": False, "enable_flexkv": False, "enable_unified_cache_external_linker": False}
    return SimpleNamespace(**{**off, "hicache_storage_backend": None, "radix_cache_backend": None, **fields})


@pytest.mark.parametrize(
    ("role", "cache", "fields", "words"),
    [
        ("decode", UnifiedRadixCache(), {}, "remove --disaggregation-decode-enable-radix-cache"),
        ("decode", PublishesItself(), {}, "remove --disaggregation-decode-enable-radix-cache"),
        ("unified", PublishesItself(), {}, "PublishesItself cannot be used on a unified worker"),
        ("unified", Another(), {}, "Another cannot be used on a unified worker"),
        ("prefill", UnifiedRadixCache(), {"enable_lmcache": True}, "--enable-lmcache cannot be used"),
        ("prefill", UnifiedRadixCache(), {"enable_flexkv": True}, "--enable-flexkv cannot be used"),
        ("unified", UnifiedRadixCache(), {"enable_unified_cache_external_linker": True}, "linker cannot be used"),
        ("unified", Inherits(), {"hicache_storage_backend": "file"}, "--hicache-storage-backend cannot be used"),
        ("prefill", Off(), {"radix_cache_backend": "own"}, "--radix-cache-backend cannot be used"),
    ],
)
def test_caches_that_share_kv_among_adapters_are_refused(role: str, cache: Any, fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        check_prefix_cache(role, cache, settings(**fields))


@pytest.mark.parametrize(
    ("role", "cache"),
    [
        ("decode", Off()),
        ("prefill", UnifiedRadixCache()),
        ("prefill", PublishesItself()),  # no answer's KV is ever in a prefill engine
        ("unified", UnifiedRadixCache()),
        ("unified", Inherits()),
        ("unified", Off()),
        ("stock", PublishesItself()),
    ],
)
def test_others_are_not(role: str, cache: Any):
    check_prefix_cache(role, cache, settings())


def test_a_scheduler_with_a_wrong_cache_reports_nothing(monkeypatch: pytest.MonkeyPatch):
    from engine.hooks import inspection

    monkeypatch.setenv("PRELUDE_ENGINE_ROLE", "decode")
    monkeypatch.setattr(inspection, "report", lambda: pytest.fail("it reported"))
    monkeypatch.setattr(inspection, "ResolvedSettings", settings)
    scheduler = SimpleNamespace(tree_cache=UnifiedRadixCache(), tp_worker=SimpleNamespace(model_runner=None))
    with pytest.raises(ValueError, match="a decode engine cannot have a prefix cache"):
        inspection.report_scheduler({}, scheduler)


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_our_engines_cut_no_prompt(role: str):
    check_whole_prompts(role, SimpleNamespace(allow_auto_truncate=False))
    with pytest.raises(ValueError, match=r"--allow-auto-truncate cannot be used: .* remove it from extra_arguments"):
        check_whole_prompts(role, SimpleNamespace(allow_auto_truncate=True))


def test_stock_engines_may():
    check_whole_prompts("stock", SimpleNamespace(allow_auto_truncate=True))


@pytest.mark.parametrize(
    ("name", "on"), [("enable_pd_role_switch", True), ("enable_http2", True), ("grpc_port", 50051)]
)
def test_nobody_gets_past_the_hooks(name: str, on: Any):
    off = {"enable_pd_role_switch": False, "enable_http2": False, "grpc_port": None}
    check_entrances("decode", SimpleNamespace(**off))
    check_entrances("stock", SimpleNamespace(**{**off, name: on}))
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} cannot be used"):
        check_entrances("decode", SimpleNamespace(**{**off, name: on}))
