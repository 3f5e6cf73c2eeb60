"""A filled slot holds the image's adapter, up to the rank that kernels read."""

import pytest
import torch

from engine.adapter_slots.slot_images import Region, SlotFiller, SlotImage

SLOTS, RANK = 4, 8
SHAPES = ((RANK, 6), (10, RANK), (2 * RANK, 5), (7, RANK))  # A and B of two modules


@pytest.fixture
def buffers() -> list[torch.Tensor]:
    """Filled with values of earlier adapters."""
    return [torch.randn(SLOTS, *shape) for shape in SHAPES]


def image(rank: int) -> SlotImage:
    """An adapter with factors in each of the buffers."""
    regions, parts, start = [], [], 0
    for number, (rows, columns) in enumerate(SHAPES):
        shape = (rows, rank) if number % 2 else (rank * (2 if number == 2 else 1), columns)
        regions.append(Region(number, shape, start, (shape[1], 1), 0, (columns, 1)))
        parts.append(torch.randn(shape))
        start += parts[-1].numel()
    return SlotImage(torch.cat([part.flatten() for part in parts]), tuple(regions))


def assert_is_in(buffers, slot: int, own: SlotImage) -> None:
    for region in own.regions:
        rows, columns = region.shape
        wanted = own.data[region.source : region.source + rows * columns].view(rows, columns)
        assert torch.equal(buffers[region.buffer][slot, :rows, :columns], wanted)


def filler_of(buffers) -> SlotFiller:
    return SlotFiller(buffers, sum(rows * columns for rows, columns in SHAPES))


@pytest.mark.parametrize("max_piece", [RANK * 10, 10 * RANK + 1, 10**4])
@pytest.mark.parametrize("rank", [3, RANK])
def test_a_large_image_comes_in_pieces(buffers, rank: int, max_piece: int):
    own, filler, others = image(rank), SlotFiller(buffers, max_piece), [buffer[[0, 3]].clone() for buffer in buffers]
    for slot in (1, 2):
        filler.fill(slot, own)
        assert_is_in(buffers, slot, own)
    assert all(torch.equal(buffer[[0, 3]], before) for buffer, before in zip(buffers, others, strict=True))


def test_a_cleared_slot_is_zero_and_no_other_is_touched(buffers):
    filler = filler_of(buffers)
    for _ in range(2):  # the second time with the views of the first
        filler.fill(1, image(RANK))
        others = [buffer[[0, 2, 3]].clone() for buffer in buffers]
        filler.clear(1)
        assert not any(buffer[1].any() for buffer in buffers)
        assert all(torch.equal(buffer[[0, 2, 3]], before) for buffer, before in zip(buffers, others, strict=True))


def test_many_adapters_of_many_shapes_take_turns(buffers):
    filler, known = filler_of(buffers), []
    for rank in range(1, RANK + 1):
        first = image(rank)
        known += [first, image(rank), SlotImage(torch.randn(len(first.data)), first.regions)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for number in torch.randperm(len(known), generator=generator).tolist():
            slot = number % SLOTS
            filler.fill(slot, known[number])
            assert_is_in(buffers, slot, known[number])
    assert len(filler._layouts) == 8  # of 16


def test_experts_that_fill_the_buffer_are_not_zeroed_first(monkeypatch):
    """Zeroing gigabytes takes as long as filling them."""
    zeroed = []
    monkeypatch.setattr(torch, "_foreach_zero_", zeroed.append)
    experts, data = torch.randn(SLOTS, 4, RANK, 6), torch.randn(4 * RANK * 6)
    strides = (RANK * 6, 6, 1)
    SlotFiller([experts], len(data)).fill(0, SlotImage(data, (Region(0, (4, RANK, 6), 0, strides, 0, strides),)))
    assert torch.equal(experts[0].flatten(), data)
    assert zeroed == []
