"""The segments that kernels have programs for. One too few, and a segment's tokens would silently be base tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.adapter_slots.lora_expand import segments_in


@pytest.mark.slow
def test_every_batch_of_a_graph_has_room():
    script = Path(__file__).with_name("segments_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 <= int(done.stdout.split()[-1]) <= 1  # of all cases the fullest: the bound is hardly larger than needed


def test_a_small_graph_has_fewer_programs_than_the_largest():
    def room(num_tokens: int) -> int:
        largest = SimpleNamespace(use_cuda_graph=True, weight_indices=[0] * (64 + 33), max_len=128)
        return segments_in(largest, num_tokens, 33)

    assert (room(256), room(2048), room(4096), room(8192)) == (16 + 33, 16 + 33, 32 + 33, 64 + 33)


def test_without_a_graph_each_segment_of_the_batch_has_its_programs():
    batch = SimpleNamespace(use_cuda_graph=False, num_segments=5, max_len=16)
    assert segments_in(batch, 4000, 33) == 5
