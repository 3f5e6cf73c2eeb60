"""A decode engine's pages of KV: the hooks give and free those that SGLang's own allocator would, and when."""

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
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator as Base
from engine.hooks.kv.pages import free_whole_pages, take_whole_pages, wait_for_the_running_step

common = dict(dtype=torch.float32, device="cpu", kvcache=None, need_sort=True)
unique, searches = torch.unique, []
def counted(*words, **options):
    searches.append(words)
    return unique(*words, **options)
torch.unique = counted

def lives(allocator, tokens, generated, start):
    \"\"\"A prompt of so many tokens comes, generates some and ends.\"\"\"
    free_before = sorted(allocator.free_pages.tolist() + allocator.release_pages.tolist())
    request = SimpleNamespace(kv=None, req_pool_idx=0, cache_protected_len=start)
    details = dict(req=request, fill_len=tokens, delta_len=tokens, prefix_len=0, prefix_indices=None, swa_tail_len=0)
    places = take_whole_pages(
        alloc_for_decode_prealloc, allocator, total_prefix_len=0, uses_swa_tail=False, **details
    ).tolist()
    page = allocator.page_size
    rest = -(-tokens // page) * page - tokens  # of its last page, which the next tokens take
    first = places[-1] + 1
    more = [] if generated > rest else list(range(first, first + generated))
    row = torch.zeros((1, 128), dtype=torch.int32)
    row[0, : tokens + len(more)] = torch.tensor(places + more, dtype=torch.int32)
    cache = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=row), token_to_kv_pool_allocator=allocator)
    held = allocator.alloc(page)  # another request's
    free_whole_pages(ChunkCache.cache_finished_req, cache, request, kv_len_to_handle=tokens + len(more))
    allocator.free(held)
    free_after = sorted(allocator.free_pages.tolist() + allocator.release_pages.tolist())
    return {
        "places": places, "known": request.kv.kv_allocated_len, "same_free": free_after == free_before,
        "missing": len(set(free_before) - set(free_after)),
    }

found = {}
for name, allocator in (
    ("token", TokenToKVPoolAllocator(128, **common)), ("pages", PagedTokenToKVPoolAllocator(128, 16, **common))
):
    lives_of = []
    for tokens, generated in ((1, 0), (15, 1), (16, 0), (17, 3), (48, 0), (50, 14)):
        searches.clear()
        lives_of.append({"tokens": tokens, **lives(allocator, tokens, generated, 0), "searches": len(searches)})
    found[name] = lives_of
full = PagedTokenToKVPoolAllocator(32, 16, **common)
details = dict(fill_len=33, delta_len=33, prefix_len=0, prefix_indices=None, swa_tail_len=0)
details["req"] = SimpleNamespace(kv=None)
found["full"] = take_whole_pages(alloc_for_decode_prealloc, full, total_prefix_len=0, uses_swa_tail=False, **details)
shared = PagedTokenToKVPoolAllocator(128, 16, **common)  # a prefix of one page is not this request's to free
found["prefix"] = lives(shared, 40, 0, 16)["missing"]

waits = []
torch.cuda.synchronize = waits.append
original = Base.merge_and_sort_free
Base.merge_and_sort_free = lambda self: wait_for_the_running_step(original, self)

def reused(allocator):
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

allocators = TokenToKVPoolAllocator(256, **common), PagedTokenToKVPoolAllocator(256, 16, **common)
found["reused"] = [reused(each) for each in allocators]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["token", "pages"])
def test_a_prompt_gets_neighbouring_places_of_whole_pages(found: dict, allocator: str):
    for life in found[allocator]:
        places, page = life["places"], 16 if allocator == "pages" else 1
        assert len(places) == life["known"] == life["tokens"]
        assert all(place % page == index % page for index, place in enumerate(places)), life
        assert len({place // page for place in places}) == -(-life["tokens"] // page), life


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["token", "pages"])
def test_its_pages_come_back_once(found: dict, allocator: str):
    assert all(life["same_free"] for life in found[allocator]), found[allocator]


@pytest.mark.slow
def test_nothing_is_searched_for(found: dict):
    # One search is the test's own, for the page of another request.
    assert [life["searches"] for life in found["pages"]] == [1] * 6
    assert [life["searches"] for life in found["token"]] == [0] * 6


@pytest.mark.slow
def test_a_full_cache_and_a_shared_prefix(found: dict):
    assert found["full"] is None
    assert found["prefix"] == 1


@pytest.mark.slow
def test_pages_that_were_just_freed_come_last_and_after_a_wait(found: dict):
    assert found["reused"] == [[[0, False], [0, False], [1, True], [1, True]]] * 2
