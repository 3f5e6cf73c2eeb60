"""Our LoRA kernels, interpreted on a CPU; compiled with PRELUDE_TEST_DEVICE=cuda."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.adapter_slots.lora_expand import segments_in
from engine.adapter_slots.lora_shrink import steps_for


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["expand", "shrink"])
def test_against_the_formula(kernel: str):
    script = Path(__file__).with_name(f"lora_{kernel}_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_small_graph_has_fewer_programs_than_the_largest():
    def room(num_tokens: int, use_cuda_graph: bool = True) -> int:
        batch = SimpleNamespace(
            use_cuda_graph=use_cuda_graph, weight_indices=[0] * (64 + 33), max_len=128, num_segments=5
        )
        return segments_in(batch, num_tokens, 33)

    assert (room(256), room(2048), room(4096), room(8192)) == (16 + 33, 16 + 33, 32 + 33, 64 + 33)
    assert room(4000, use_cuda_graph=False) == 5


@pytest.mark.parametrize("kib", [227, 99])  # an H100, an L40S
@pytest.mark.parametrize(("rows", "columns", "element_bytes"), [(16, 64, 2), (128, 64, 2), (128, 64, 4), (16, 16, 2)])
def test_steps_fit_into_shared_memory(rows: int, columns: int, element_bytes: int, kib: int):
    block_k, stages = steps_for(rows, columns, 4096, element_bytes, kib * 1024)
    assert (rows + columns) * block_k * stages * element_bytes <= kib * 1024
    assert stages >= 2
    assert block_k >= 64
