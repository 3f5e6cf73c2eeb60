"""A CUDA graph's kernels have programs for the segments that SGLang makes of any batch: one too few, and a segment's
tokens would silently be base tokens."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.adapter_slots.lora_expand import segments_in

GRAPHS = (*range(4, 68, 4), *range(80, 272, 16), 384, 512, 1024, 2048, 8192)  # tokens
RNG = random.Random(1)


class Backend:
    """SGLang's, with chunks of at most so many tokens."""

    def __init__(self, largest_chunk: int) -> None:
        from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend

        self._sglangs, self._settings = ChunkedSgmvLoRABackend, SimpleNamespace(max_chunk_size=largest_chunk)

    def chunk_of(self, num_tokens: int) -> int:
        return self._sglangs._determine_chunk_size_for_tokens(self._settings, num_tokens)

    def num_segments_of(self, counts: list[int]) -> int:
        """Of a batch with so many tokens in each slot."""
        slots = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return len(self._sglangs._get_segments_info(None, slots, self.chunk_of(sum(counts)))[0])

    def room_of(self, graph: int, num_slots: int) -> int:
        """The segments of the graph for so many tokens, whose buffers are those of SGLang's largest one."""
        buffers = max(-(-GRAPHS[-1] // self.chunk_of(GRAPHS[-1])), 16) + num_slots
        batch_info = SimpleNamespace(
            use_cuda_graph=True, weight_indices=[0] * buffers, max_len=self.chunk_of(graph), num_segments=1
        )
        return segments_in(batch_info, graph, num_slots)


def batches_of(num_tokens: int, num_slots: int, chunk: int) -> list[list[int]]:
    """Tokens of each slot: of one slot, at random, and with as many short segments as can be."""
    ones = min(num_slots, num_tokens) - 1
    short = [*[1] * ones, num_tokens - ones]
    if ones and short[-1] > 1 and short[-1] % chunk == 0:
        short[0], short[-1] = 2, short[-1] - 1
    cuts = sorted(RNG.choices(range(num_tokens + 1), k=num_slots - 1))
    split = [end - begin for begin, end in itertools.pairwise([0, *cuts, num_tokens])]
    return [[num_tokens], [count for count in split if count], short]


@pytest.mark.slow
def test_every_batch_of_a_graph_has_programs_for_its_segments(sglang, monkeypatch: pytest.MonkeyPatch):
    for name in ("tensor", "empty"):  # SGLang page-locks the bounds of segments, for which there may be no driver
        plain: Any = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, f=plain, pin_memory=False, **k: f(*a, **k))
    free = []
    for largest_chunk, num_slots in itertools.product((16, 32, 64, 128), (2, 9, 33)):
        backend = Backend(largest_chunk)
        for smaller, graph in itertools.pairwise((0, *GRAPHS)):
            sizes = {smaller + 1, RNG.randint(smaller + 1, graph), graph}
            sizes |= {size for size in (63, 255) if size <= graph}  # the last before chunks grow, even if padded far
            room = backend.room_of(graph, num_slots)
            for size in sizes:
                for counts in batches_of(size, num_slots, backend.chunk_of(size)):
                    free.append(room - backend.num_segments_of(counts))
                    assert free[-1] >= 0, (graph, largest_chunk, counts)
    assert min(free) <= 1  # in the fullest case: the bound is hardly larger
