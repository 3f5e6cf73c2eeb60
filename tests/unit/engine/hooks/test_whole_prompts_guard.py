"""The option that cuts prompts is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.hooks.guards.prefix_cache import check_whole_prompts


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_our_engines_cut_no_prompt(role: str):
    check_whole_prompts(role, SimpleNamespace(allow_auto_truncate=False))
    with pytest.raises(ValueError, match=r"--allow-auto-truncate cannot be used: .* remove it from extra_arguments"):
        check_whole_prompts(role, SimpleNamespace(allow_auto_truncate=True))


def test_stock_engines_may():
    check_whole_prompts("stock", SimpleNamespace(allow_auto_truncate=True))
