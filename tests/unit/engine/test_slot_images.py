"""Slots filled from images are what they were when the images were recorded."""

from __future__ import annotations

import pytest
import torch

from engine import slot_images
from engine.slot_images import SlotFiller

SLOTS, RANK = 4, 8


@pytest.fixture
def buffers() -> list[torch.Tensor]:
    """A and B of two layers, full of what former adapters left."""
    return [torch.randn(SLOTS, *shape) for shape in ((RANK, 6), (10, RANK), (2 * RANK, 5), (7, RANK))]


def copy(buffers, slot: int, rank: int, numbers=(0, 1, 2, 3)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As SGLang fills a slot: the rank's part of each buffer, zeros where the adapter has nothing."""
    copies = []
    for number, buffer in enumerate(buffers):
        view = buffer[slot, :, :rank] if number % 2 else buffer[slot, : rank * (2 if number == 2 else 1)]
        if number not in numbers:
            buffer[slot].zero_()
            continue
        weight = torch.randn(view.shape)
        view.copy_(weight)
        copies.append((view, weight))
    return copies


def used(buffers, slot: int, rank: int) -> list[torch.Tensor]:
    """What kernels read: beyond the rank they do not look."""
    parts = [
        buffers[0][slot, :rank],
        buffers[1][slot, :, :rank],
        buffers[2][slot, : 2 * rank],
        buffers[3][slot, :, :rank],
    ]
    return [part.clone() for part in parts]


@pytest.mark.parametrize(("rank", "numbers"), [(RANK, (0, 1, 2, 3)), (3, (0, 1, 2, 3)), (5, (0, 1)), (1, (2, 3))])
@pytest.mark.parametrize("target", range(SLOTS))
def test_a_slot_is_what_was_recorded(buffers, rank: int, numbers, target: int):
    filler = SlotFiller(buffers)
    image = filler.image_of(1, copy(buffers, 1, rank, numbers))
    expected = used(buffers, 1, rank)
    others = [buffer.clone() for buffer in buffers]
    filler.fill(target, image)
    for found, wanted in zip(used(buffers, target, rank), expected, strict=True):
        assert torch.equal(found, wanted)
    for slot in set(range(SLOTS)) - {target}:
        for buffer, before in zip(buffers, others, strict=True):
            assert torch.equal(buffer[slot], before[slot])


def test_many_adapters_of_many_shapes_take_turns(buffers):
    filler = SlotFiller(buffers)
    known = []
    for rank in range(1, RANK + 1):
        for _ in range(3):  # the same layout for several
            image = filler.image_of(2, copy(buffers, 2, rank))
            known.append((rank, image, used(buffers, 2, rank)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for number in torch.randperm(len(known), generator=generator).tolist():
            rank, image, expected = known[number]
            slot = number % SLOTS
            filler.fill(slot, image)
            assert all(torch.equal(f, w) for f, w in zip(used(buffers, slot, rank), expected, strict=True))
    assert len(filler._layouts) <= 8


def test_what_is_not_of_the_slot_has_no_image(buffers):
    filler = SlotFiller(buffers)
    copies = copy(buffers, 1, RANK)
    assert filler.image_of(2, copies) is None  # recorded for another slot
    foreign = torch.zeros(3)
    assert filler.image_of(1, [*copies, (foreign, foreign)]) is None
    view, weight = copies[0]
    assert filler.image_of(1, [(view, weight.double())]) is None


def test_an_adapter_without_lora_leaves_zeros(buffers):
    filler = SlotFiller(buffers)
    image = filler.image_of(0, [])
    assert image.blocks == ()
    filler.fill(3, image)
    assert not any(buffer[3].any() for buffer in buffers)


def test_an_image_is_held_in_powers_of_two(monkeypatch):
    monkeypatch.setattr(slot_images, "_SMALLEST_BLOCK", 64)
    flat = torch.arange(1000, dtype=torch.float32)
    blocks = slot_images._in_blocks(flat, is_page_locked=False)
    assert torch.equal(torch.cat(blocks), flat)
    assert [4 * len(block) for block in blocks] == [2048, 1024, 512, 256, 128, 32]


def test_an_image_in_many_blocks_fills_a_slot(monkeypatch, buffers):
    monkeypatch.setattr(slot_images, "_SMALLEST_BLOCK", 64)
    filler = SlotFiller(buffers)
    image = filler.image_of(1, copy(buffers, 1, RANK))
    assert len(image.blocks) == 2
    expected = used(buffers, 1, RANK)
    filler.fill(3, image)
    assert all(torch.equal(f, w) for f, w in zip(used(buffers, 3, RANK), expected, strict=True))


def test_which_regions_are_one_piece(buffers):
    filler = SlotFiller(buffers)
    narrow, whole = (filler.image_of(1, copy(buffers, 1, rank)) for rank in (3, RANK))
    assert [slot_images._is_dense(region) for region in narrow.regions] == [True, False, True, False]
    assert all(slot_images._is_dense(region) for region in whole.regions)
