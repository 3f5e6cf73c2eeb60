"""Arguments under which KV would cross adapters or tenants, or prompts would be cut, are refused at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.hooks.guards.prefix_cache import check_prefix_cache, check_whole_prompts


class RadixCache:
    """SGLang's, by its name; `tests/engine/test_prefix_cache_probing.py` has the real ones."""

    disable = False

    def is_chunk_cache(self) -> bool:
        return False

    def cache_finished_req(self) -> None: ...

    def cache_unfinished_req(self) -> None: ...


RadixCache.__module__ = "sglang.srt.mem_cache.radix_cache"


class InheritsBoth(RadixCache):
    def evict(self) -> None: ...


class FinishesItself(RadixCache):
    def cache_finished_req(self) -> None: ...


class RetractsItself(RadixCache):
    def cache_unfinished_req(self) -> None: ...


class OffRadixCache(FinishesItself):
    disable = True


class ChunkCache(FinishesItself):
    def is_chunk_cache(self) -> bool:
        return True


def settings(**fields: Any) -> SimpleNamespace:
    off = {"enable_lmcache": False, "enable_flexkv": False, "hicache_storage_backend": None}
    return SimpleNamespace(**{**off, "radix_cache_backend": None, **fields})


@pytest.mark.parametrize(
    ("role", "cache", "fields", "words"),
    [
        ("decode", RadixCache(), {}, "remove --disaggregation-decode-enable-radix-cache"),
        ("decode", FinishesItself(), {}, "remove --disaggregation-decode-enable-radix-cache"),
        ("unified", FinishesItself(), {}, "FinishesItself cannot be used .* its cache_finished_req"),
        ("unified", RetractsItself(), {}, "RetractsItself cannot be used .* its cache_unfinished_req"),
        ("prefill", RadixCache(), {"enable_lmcache": True}, "--enable-lmcache cannot be used"),
        ("prefill", RadixCache(), {"enable_flexkv": True}, "--enable-flexkv cannot be used"),
        ("unified", InheritsBoth(), {"hicache_storage_backend": "file"}, "--hicache-storage-backend cannot be used"),
        ("prefill", ChunkCache(), {"radix_cache_backend": "own"}, "--radix-cache-backend cannot be used"),
    ],
)
def test_caches_that_share_kv_among_adapters_are_refused(role: str, cache: Any, fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        check_prefix_cache(role, cache, settings(**fields))


@pytest.mark.parametrize(
    ("role", "cache"),
    [
        ("decode", ChunkCache()),
        ("decode", OffRadixCache()),
        ("prefill", RadixCache()),
        ("prefill", FinishesItself()),  # no answer's KV is ever in a prefill engine
        ("unified", RadixCache()),
        ("unified", InheritsBoth()),
        ("unified", ChunkCache()),
        ("unified", OffRadixCache()),
        ("stock", FinishesItself()),
    ],
)
def test_others_are_not(role: str, cache: Any):
    check_prefix_cache(role, cache, settings())


def test_a_scheduler_with_a_wrong_cache_reports_nothing(monkeypatch: pytest.MonkeyPatch):
    from engine.hooks import inspection

    monkeypatch.setenv("PRELUDE_ENGINE_ROLE", "decode")
    monkeypatch.setattr(inspection, "report", lambda: pytest.fail("it reported"))
    scheduler = SimpleNamespace(
        tree_cache=RadixCache(), server_args=settings(), tp_worker=SimpleNamespace(model_runner=None)
    )
    with pytest.raises(ValueError, match="a decode engine cannot have a prefix cache"):
        inspection.report_scheduler({}, scheduler)


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_our_engines_cut_no_prompt(role: str):
    check_whole_prompts(role, SimpleNamespace(allow_auto_truncate=False))
    with pytest.raises(ValueError, match=r"--allow-auto-truncate cannot be used: .* remove it from extra_arguments"):
        check_whole_prompts(role, SimpleNamespace(allow_auto_truncate=True))


def test_stock_engines_may():
    check_whole_prompts("stock", SimpleNamespace(allow_auto_truncate=True))
