"""Settings that the adapter hooks do not support are refused at start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.hooks import memory_pool


@pytest.mark.parametrize(
    ("arguments", "backend", "environment", "words"),
    [
        ({"enable_lora_overlap_loading": True}, "csgmv", {}, "--enable-lora-overlap-loading cannot be used"),
        ({"enable_dp_attention": True}, "csgmv", {}, "--enable-dp-attention cannot be used"),
        ({"speculative_algorithm": "NGRAM"}, "csgmv", {}, "--speculative-algorithm cannot be used"),
        ({"max_loaded_loras": 4}, "csgmv", {}, "--max-loaded-loras cannot be used"),
        ({"tokenizer_worker_num": 2}, "csgmv", {}, "--tokenizer-worker-num above 1 cannot be used"),
        ({}, "triton", {}, "--lora-backend triton is not supported"),
        ({}, "csgmv", {"SGLANG_EXPERIMENTAL_LORA_OPTI": "1"}, "unset it"),
    ],
)
def test_settings_that_hooks_are_not_written_for_are_refused(arguments, backend, environment, words):
    with pytest.raises(ValueError, match=words):
        memory_pool.check_supported(SimpleNamespace(**arguments), backend, environment)


@pytest.mark.parametrize("backend", ["csgmv", "torch_native"])
def test_other_settings_are_not(backend: str):
    defaults = {"enable_dp_attention": False, "speculative_algorithm": None, "max_loaded_loras": None}
    memory_pool.check_supported(SimpleNamespace(**defaults, tokenizer_worker_num=1), backend, {})
