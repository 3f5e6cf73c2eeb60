"""Fills on a second stream never overtake a batch that reads the slot, and batches never read a half-filled slot.

Without a GPU the streams are stand-ins that note which work is ordered before which; they do not show speed.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.adapter_slots.fill_stream import FillStream
from tests.support.engines.running_engine import DEVICE

SLOTS = 4


class Stream:
    """A CUDA stream as the set of all work that is done before its next work begins."""

    def __init__(self, _device=None, priority: int = 0) -> None:
        self.done: frozenset[int] = frozenset()

    def wait_event(self, event: Event) -> None:
        self.done |= event.done

    def wait_stream(self, stream: Stream) -> None:
        self.done |= stream.done


class Event:
    def record(self, stream: Stream) -> None:
        self.done = stream.done


class Gpu:
    """Runs work on the current stream and checks that no two pieces of work race for a slot."""

    def __init__(self, monkeypatch) -> None:
        self.computing = self.current = Stream()
        self._work = 0
        self._reads: dict[int, set[int]] = {slot: set() for slot in range(SLOTS)}
        self._writes: dict[int, set[int]] = {slot: set() for slot in range(SLOTS)}
        self.waited: list[frozenset[int]] = []  # what was done before each write
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextmanager
    def _on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def _run(self) -> int:
        self._work += 1
        self.current.done |= {self._work}
        return self._work

    def read(self, slots) -> int:
        for slot in slots:
            assert self._writes[slot] <= self.current.done, f"slot {slot} is read while it is filled"
        number = self._run()
        for slot in slots:
            self._reads[slot].add(number)
        return number

    def write(self, slot: int) -> None:
        assert self._reads[slot] <= self.current.done, f"slot {slot} is filled while a batch reads it"
        assert self._writes[slot] <= self.current.done, f"slot {slot} is filled twice at once"
        self.waited.append(self.current.done)
        self._writes[slot].add(self._run())


def run_batch(gpu: Gpu, fills: FillStream, filled, read) -> int:
    fills.begin_batch()
    for slot in filled:
        with fills.writing(slot):
            gpu.write(slot)
    fills.end_fills(read)
    return gpu.read(read)


slots = st.sets(st.integers(0, SLOTS - 1), min_size=1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), slots, st.sets(st.integers(0, SLOTS - 1))),
        st.tuples(st.just("base"), st.just(set()), st.just(set())),  # a batch without adapters
        st.tuples(st.just("clear"), slots, st.just(set())),
    ),
    max_size=12,
)


@given(steps)
def test_no_fill_races_with_a_batch(sequence):
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = Gpu(monkeypatch)
        fills = FillStream(torch.device("cuda"))
        for kind, read, filled in sequence:
            if kind == "batch":
                run_batch(gpu, fills, filled & read, read)
            elif kind == "base":
                gpu.read(())
            else:
                for slot in read:
                    with fills.writing(slot):
                        gpu.write(slot)


def test_a_fill_does_not_wait_for_a_batch_that_reads_other_slots(monkeypatch):
    gpu = Gpu(monkeypatch)
    fills = FillStream(torch.device("cuda"))
    first = run_batch(gpu, fills, {0}, {0})
    second = run_batch(gpu, fills, {1}, {1})
    run_batch(gpu, fills, {0}, {0})  # over what the first batch read, while the second may still run
    assert first in gpu.waited[-1]
    assert second not in gpu.waited[-1]


@pytest.mark.parametrize("is_for_a_batch", [True, False])
def test_what_made_the_buffers_is_done_before_the_first_fill(monkeypatch, is_for_a_batch: bool):
    gpu = Gpu(monkeypatch)
    made = gpu.read(())
    fills = FillStream(torch.device("cuda"))
    if is_for_a_batch:
        fills.begin_batch()
    with fills.writing(0):
        gpu.write(0)
    assert made in gpu.waited[-1]


@pytest.mark.skipif(DEVICE != "cuda", reason="the order is that of a GPU's streams")
def test_a_gpu_keeps_the_order():
    """Batches are slow readers of one buffer; every batch must have read the value of its own fill."""
    device = torch.device("cuda")
    buffer = torch.zeros(2, 1 << 20, device=device)
    values = torch.arange(1, 21, dtype=torch.float32).pin_memory()
    seen = []
    fills = FillStream(device)
    for number, value in enumerate(values.unbind()):
        slot = number % 2
        fills.begin_batch()
        with fills.writing(slot):
            torch.cuda._sleep(10**6)
            buffer[slot].copy_(value.expand(buffer.shape[1]), non_blocking=True)
        fills.end_fills({slot})
        torch.cuda._sleep(10**7)
        seen.append(buffer[slot].clone())
    for value, read in zip(values, seen, strict=True):
        assert torch.equal(read.cpu(), value.expand(buffer.shape[1]))
