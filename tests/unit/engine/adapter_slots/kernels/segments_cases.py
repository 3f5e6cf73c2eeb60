"""Compares the segments that a CUDA graph's kernels have programs for with those that SGLang makes, in a process of its
own, since SGLang's imports change much; the first graph with too few ends it."""

# ruff: noqa: E402 SGLang is imported after what it needs on a CPU
from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

from engine import cpu_support

cpu_support.install()

import torch
from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend

from engine.adapter_slots.lora_expand import segments_in

GRAPHS = (*range(4, 68, 4), *range(80, 272, 16), 384, 512, 1024, 2048, 8192)  # tokens


def without_page_locks() -> None:
    """SGLang page-locks the bounds of segments, for which a machine without a GPU has no driver."""
    for name in ("tensor", "empty"):
        plain = getattr(torch, name)
        setattr(torch, name, lambda *a, f=plain, pin_memory=False, **k: f(*a, **k))


def chunk_of(largest_chunk: int, num_tokens: int) -> int:
    backend = SimpleNamespace(max_chunk_size=largest_chunk)
    return ChunkedSgmvLoRABackend._determine_chunk_size_for_tokens(backend, num_tokens)


def num_segments_of(counts: list[int], chunk: int) -> int:
    """Of a batch with so many tokens in each slot, by SGLang."""
    slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return len(ChunkedSgmvLoRABackend._get_segments_info(None, slots, chunk)[0])


def room_of(graph: int, num_slots: int, largest_chunk: int) -> int:
    """The segments of the graph for so many tokens, whose buffers are those of SGLang's largest one."""
    buffers = max(-(-GRAPHS[-1] // chunk_of(largest_chunk, GRAPHS[-1])), 16) + num_slots
    batch_info = SimpleNamespace(
        use_cuda_graph=True, weight_indices=[0] * buffers, max_len=chunk_of(largest_chunk, graph), num_segments=1
    )
    return segments_in(batch_info, graph, num_slots)


def batches_of(num_tokens: int, num_slots: int, chunk: int, rng: random.Random) -> list[list[int]]:
    """Tokens of each slot: of one slot, at random, and with as many short segments as can be."""
    ones = min(num_slots, num_tokens) - 1
    short = [*[1] * ones, num_tokens - ones]
    if ones and short[-1] > 1 and short[-1] % chunk == 0:
        short[0], short[-1] = 2, short[-1] - 1
    cuts = sorted(rng.choices(range(num_tokens + 1), k=num_slots - 1))
    split = [end - begin for begin, end in itertools.pairwise([0, *cuts, num_tokens])]
    return [[num_tokens], [count for count in split if count], short]


def check(graph: int, smaller: int, num_slots: int, largest_chunk: int, rng: random.Random) -> int:
    """Compare for batches that are padded to this graph. Returns how many segments the fullest one left free."""
    room = room_of(graph, num_slots, largest_chunk)
    sizes = {smaller + 1, rng.randint(smaller + 1, graph), graph}
    sizes |= {size for size in (63, 255) if size <= graph}  # the last before chunks grow, even if padded far
    most = 0
    for num_tokens in sizes:
        chunk = chunk_of(largest_chunk, num_tokens)
        for counts in batches_of(num_tokens, num_slots, chunk, rng):
            found = num_segments_of(counts, chunk)
            assert found <= room, f"{found} segments, room for {room}: {graph=} {largest_chunk=} {counts=}"
            most = max(most, found)
    return room - most


if __name__ == "__main__":
    without_page_locks()
    rng = random.Random(1)
    left = [
        check(graph, smaller, num_slots, largest_chunk, rng)
        for largest_chunk in (16, 32, 64, 128)
        for num_slots in (2, 9, 33)
        for smaller, graph in itertools.pairwise((0, *GRAPHS))
    ]
    print(min(left))
