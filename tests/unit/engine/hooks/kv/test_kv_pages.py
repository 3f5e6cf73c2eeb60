"""When a decode engine's pages of KV come back, by SGLang's own allocators."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: SGLang's imports change much.
_CODE = """
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from engine.hooks.kv.room import wait_for_the_running_step

found = {}
common = dict(dtype=torch.float32, device="cpu", kvcache=None, need_sort=True)
waits = []
torch.cuda.synchronize = waits.append

def give(allocator, tokens):
    details = dict(fill_len=tokens, prefix_len=0, total_prefix_len=0, prefix_indices=None, swa_tail_len=0)
    request = SimpleNamespace(kv=SimpleNamespace())
    return wait_for_the_running_step(
        alloc_for_decode_prealloc, allocator, req=request, delta_len=tokens, uses_swa_tail=False, **details
    )

def reused(allocator):
    used = allocator.alloc(128)
    allocator.free(used)
    steps = []
    for need in (48, 40, 64):  # of 256: the third must take what was freed
        taken = give(allocator, need)
        steps.append([len(waits), bool(set(taken.tolist()) & set(used.tolist()))])
    while (taken := give(allocator, 16)) is not None:
        pass
    waits.clear()
    return steps

allocators = TokenToKVPoolAllocator(256, **common), PagedTokenToKVPoolAllocator(256, 16, **common)
found["reused"] = [reused(each) for each in allocators]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_pages_that_were_just_freed_come_last_and_after_a_wait():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["reused"] == [[[0, False], [0, False], [1, True]]] * 2
