"""A filled slot holds the image's adapter, up to the rank that kernels read."""

from __future__ import annotations

import pytest
import torch

from engine.adapter_slots.slot_images import Region, SlotFiller, SlotImage

SLOTS, RANK = 4, 8
SHAPES = ((RANK, 6), (10, RANK), (2 * RANK, 5), (7, RANK))  # A and B of two modules


@pytest.fixture
def buffers() -> list[torch.Tensor]:
    """Filled with values of earlier adapters."""
    return [torch.randn(SLOTS, *shape) for shape in SHAPES]


def image(rank: int, numbers=(0, 1, 2, 3)) -> SlotImage:
    """An adapter with factors in some of the buffers."""
    regions, parts, start = [], [], 0
    for number in numbers:
        rows, columns = SHAPES[number]
        shape = (rows, rank) if number % 2 else (rank * (2 if number == 2 else 1), columns)
        regions.append(Region(number, shape, start, (shape[1], 1), 0, (columns, 1)))
        parts.append(torch.randn(shape))
        start += parts[-1].numel()
    return SlotImage(torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0), tuple(regions))


def assert_is_in(buffers, slot: int, own: SlotImage) -> None:
    written = set()
    for region in own.regions:
        rows, columns = region.shape
        wanted = own.data[region.source : region.source + rows * columns].view(rows, columns)
        assert torch.equal(buffers[region.buffer][slot, :rows, :columns], wanted)
        written.add(region.buffer)
    for number in set(range(len(buffers))) - written:
        assert not buffers[number][slot].any()


def filler_of(buffers) -> SlotFiller:
    return SlotFiller(buffers, sum(rows * columns for rows, columns in SHAPES))


@pytest.mark.parametrize("max_piece", [RANK * 10, 10 * RANK + 1, 10**4])
@pytest.mark.parametrize("rank", [3, RANK])
def test_a_large_image_comes_in_pieces(buffers, rank: int, max_piece: int):
    own, filler = image(rank), SlotFiller(buffers, max_piece)
    for slot in (1, 2):
        filler.fill(slot, own)
        assert_is_in(buffers, slot, own)
    assert len(filler._staging) == max_piece


@pytest.mark.parametrize(
    ("rank", "numbers"), [(RANK, (0, 1, 2, 3)), (3, (0, 1, 2, 3)), (5, (0, 1)), (1, (2, 3)), (2, ())]
)
@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_slot_is_the_images(buffers, rank: int, numbers, slot: int):
    own, others = image(rank, numbers), [buffer.clone() for buffer in buffers]
    filler_of(buffers).fill(slot, own)
    assert_is_in(buffers, slot, own)
    for other in set(range(SLOTS)) - {slot}:
        for buffer, before in zip(buffers, others, strict=True):
            assert torch.equal(buffer[other], before[other])


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
        known += [first, *(SlotImage(torch.randn(len(first.data)), first.regions) for _ in range(2))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for number in torch.randperm(len(known), generator=generator).tolist():
            slot = number % SLOTS
            filler.fill(slot, known[number])
            assert_is_in(buffers, slot, known[number])
    assert len(filler._layouts) <= 8


def test_a_part_of_a_matrix_arrives_where_it_belongs(buffers):
    """As for a tensor-parallel rank: some columns of A, two ranges of rows of B below each other."""
    a, b = torch.randn(RANK, 12), torch.randn(20, RANK)
    data = torch.cat([a.flatten(), b.flatten()])
    own = SlotImage(
        data,
        (
            Region(0, (RANK, 6), 6, (12, 1), 0, (6, 1)),
            Region(1, (4, RANK), len(a.flatten()) + 3 * RANK, (RANK, 1), 0, (RANK, 1)),
            Region(1, (6, RANK), len(a.flatten()) + 12 * RANK, (RANK, 1), 4 * RANK, (RANK, 1)),
        ),
    )
    SlotFiller(buffers, len(data)).fill(2, own)
    assert torch.equal(buffers[0][2], a[:, 6:])
    assert torch.equal(buffers[1][2], torch.cat([b[3:7], b[12:18]]))
    assert not buffers[2][2].any()


def test_experts_are_filled_between_zeros():
    """Experts 1 and 2 of four get their matrices; kernels read the whole buffer, so the rest must be zero."""
    experts, untouched = torch.randn(SLOTS, 4, RANK, 6), torch.randn(SLOTS, 7, RANK)
    data = torch.randn(2 * 3 * 6 + 7 * 2)
    regions = (
        Region(0, (2, 3, 6), 0, (18, 6, 1), RANK * 6, (RANK * 6, 6, 1)),
        Region(1, (7, 2), 36, (2, 1), 0, (RANK, 1)),
    )
    before, filler = untouched.clone(), SlotFiller([experts, untouched], 40)
    filler.fill(3, SlotImage(data, regions))
    wanted = torch.zeros(4, RANK, 6)
    wanted[1:3, :3] = data[:36].view(2, 3, 6)
    assert torch.equal(experts[3], wanted)
    assert torch.equal(untouched[3, :, :2], data[36:].view(7, 2))
    assert torch.equal(untouched[3, :, 2:], before[3, :, 2:])  # kernels read up to the adapter's rank there
    filler.fill(3, SlotImage(torch.empty(0), ()))
    assert not experts[3].any()
    assert not untouched[3].any()


def test_experts_that_fill_the_buffer_are_not_zeroed_first(monkeypatch):
    """Zeroing gigabytes takes as long as filling them."""
    zeroed = []
    monkeypatch.setattr(torch, "_foreach_zero_", zeroed.append)
    experts, data = torch.randn(SLOTS, 4, RANK, 6), torch.randn(4 * RANK * 6)
    strides = (RANK * 6, 6, 1)
    SlotFiller([experts], len(data)).fill(0, SlotImage(data, (Region(0, (4, RANK, 6), 0, strides, 0, strides),)))
    assert torch.equal(experts[0].flatten(), data)
    assert zeroed == []
