"""Where a batch's new tokens go on a CPU, compared with SGLang's `alloc_extend_naive`."""

from __future__ import annotations

from random import Random

import pytest
import torch

from engine.hooks.cpu import kernel_for_next_tokens, kernel_for_prompts

PAGES = 40


@pytest.fixture(scope="module")
def paged():
    from engine import cpu_support

    cpu_support.install()
    from sglang.srt.mem_cache.allocator import paged

    return paged


def sequences(random: Random, page: int) -> tuple[list[int], list[int], list[int], torch.Tensor]:
    """Lengths before and after, the slot of the last token before, and the pages that are free."""
    pages = random.sample(range(1, PAGES), PAGES - 1)
    before = [random.choice((0, 1, page - 1, page, page + 1, random.randrange(3 * page))) for _ in range(4)]
    after = [length + random.randrange(1, 2 * page + 2) for length in before]
    own = [pages.pop() for _ in before]  # each one's last page
    last = [page * mine + (length - 1) % page if length else -1 for mine, length in zip(own, before, strict=True)]
    return before, after, last, torch.tensor(pages)


@pytest.mark.parametrize("page", [2, 16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_prompts_and_their_next_chunks(paged, page: int, seed: int) -> None:
    before, after, last, free = sequences(Random(seed), page)
    found, expected = (torch.full((sum(after) - sum(before),), -1) for _ in range(2))
    lengths = [torch.tensor(values) for values in (before, after, last)]
    kernel_for_prompts(None)[(4,)](*lengths, free, found, 4, page)
    paged.alloc_extend_naive(*lengths, free, expected, page, "cpu")
    assert found.tolist() == expected.tolist()
    assert len(set(found.tolist())) == len(found)


@pytest.mark.parametrize("page", [2, 16, 64])
@pytest.mark.parametrize("seed", range(20))
def test_the_next_token_of_each(paged, page: int, seed: int) -> None:
    before, _, last, free = sequences(Random(seed), page)
    after = torch.tensor(before) + 1
    found, expected = (torch.full((4,), -1) for _ in range(2))
    kernel_for_next_tokens(None)[(4,)](after, torch.tensor(last), free, found, 4, page)
    paged.alloc_extend_naive(torch.tensor(before), after, torch.tensor(last), free, expected, page, "cpu")
    assert found.tolist() == expected.tolist()
