"""Our LoRA shrink kernel, interpreted on a CPU; compiled with PRELUDE_TEST_DEVICE=cuda."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.hooks import lora_kernels
from engine.hooks.ledger import hooks_for


@pytest.mark.slow
def test_against_the_formula():
    script = Path(__file__).with_name("lora_shrink_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("num_tokens", "most_rows", "inputs", "wanted"),
    [
        (1, 16, 4096, (16, 4)),
        (512, 128, 4096, (64, 4)),
        (2048, 128, 14336, (64, 2)),
        (2048, 32, 4096, (32, 1)),  # ReFT
        (8192, 128, 4096, (64, 1)),
        (512, 128, 1024, (64, 2)),  # a share would be too small
        (512, 128, 256, (64, 1)),
    ],
)
def test_inputs_are_shared_while_multiprocessors_are_idle(
    num_tokens: int, most_rows: int, inputs: int, wanted: tuple[int, int]
):
    from engine.adapter_slots.lora_shrink import rows_and_splits_for

    assert rows_and_splits_for(num_tokens, most_rows, inputs, 132) == wanted


@pytest.mark.parametrize(
    ("rows", "columns", "element_bytes", "kib", "steps"),
    [
        (16, 64, 2, 227, (256, 4)),  # a prompt of 2,048 tokens on an H100
        (128, 64, 2, 227, (256, 2)),
        (128, 64, 2, 99, (128, 2)),  # an L40S
        (128, 64, 4, 99, (64, 2)),  # float32
        (16, 16, 2, 227, (256, 4)),
    ],
)
def test_steps_fit_into_shared_memory(rows: int, columns: int, element_bytes: int, kib: int, steps: tuple[int, int]):
    from engine.adapter_slots.lora_shrink import steps_for

    assert steps_for(rows, columns, 4096, element_bytes, kib * 1024) == steps
    assert (rows + columns) * steps[0] * steps[1] * element_bytes <= kib * 1024


def test_only_gpu_engines_with_adapters_have_it():
    def has_it(role: str, device: str) -> bool:
        return lora_kernels.shrink_on_all_multiprocessors in {hook.fn for hook in hooks_for(role, device)}

    assert has_it("unified", "cuda")
    assert has_it("prefill", "cuda")
    assert not has_it("decode", "cuda")
    assert not has_it("stock", "cuda")  # SGLang as it is
    assert not has_it("unified", "cpu")
