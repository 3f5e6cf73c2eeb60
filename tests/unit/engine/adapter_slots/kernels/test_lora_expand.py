"""Our LoRA expand kernel, interpreted on a CPU; compiled with PRELUDE_TEST_DEVICE=cuda."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.hooks import lora_kernels
from engine.hooks.ledger import hooks_for


@pytest.mark.slow
def test_against_the_formula():
    script = Path(__file__).with_name("lora_expand_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_only_gpu_engines_with_adapters_have_it():
    def has_it(role: str, device: str) -> bool:
        return lora_kernels.expand_with_wide_accesses in {hook.fn for hook in hooks_for(role, device)}

    assert has_it("unified", "cuda")
    assert has_it("prefill", "cuda")
    assert not has_it("decode", "cuda")
    assert not has_it("stock", "cuda")  # SGLang as it is
    assert not has_it("unified", "cpu")
