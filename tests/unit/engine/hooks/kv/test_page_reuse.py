"""When a decode engine's freed KV pages can be allocated again, by SGLang's own allocators."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: SGLang's imports change much.
_CODE = """
import json
from engine import cpu_support
cpu_support.install()
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator as Base
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from engine.hooks.kv.page_reuse import wait_for_the_running_step

waits = []
torch.cuda.synchronize = waits.append
original = Base.merge_and_sort_free
Base.merge_and_sort_free = lambda self: wait_for_the_running_step(original, self)

def found(allocator):
    used = allocator.alloc(128)
    allocator.free(used)
    steps = []
    for need in (64, 64, 64):  # of 256: the third must take what was freed
        taken = allocator.alloc(need)
        steps.append([len(waits), bool(set(taken.tolist()) & set(used.tolist()))])
    allocator.alloc(64)
    full = allocator.alloc(64)  # nothing is left, nor freed
    steps.append([len(waits), full is None])
    waits.clear()
    return steps

common = dict(dtype=torch.float32, device="cpu", kvcache=None, need_sort=True)
print(json.dumps([
    found(TokenToKVPoolAllocator(256, **common)),
    found(PagedTokenToKVPoolAllocator(256, 16, **common)),
]))
"""


@pytest.mark.slow
def test_pages_that_were_just_freed_come_last_and_after_a_wait():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for steps in json.loads(done.stdout.splitlines()[-1]):
        assert steps == [[0, False], [0, False], [1, True], [1, True]]
