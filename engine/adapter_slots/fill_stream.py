"""Orders the fills of slots on a GPU: a second stream copies adapters for the next batch while this one computes.

An adapter of an 8B model at rank 16 has 84 MB, which take 1.7 ms of PCIe at 50 GB/s. In the stream that computes, a
batch of 64 new adapters would wait for 64 such copies, and with SGLang's overlap scheduling it need not: the next
batch is launched while the GPU still runs the previous one. Two waits keep answers right: a fill waits for the batches
that read the slot's previous adapter, and a batch waits for the fills before it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class FillStream:
    """The stream that writes slots. On a CPU, which runs everything in order, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        # A high priority: its small kernels, from the staging buffer into slots, run between those of a large batch.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._computing: torch.cuda.Stream | None = None  # the stream of the latest batch
        self._read_by_latest: set[int] = set()  # slots of the latest batch, which may still run
        self._read_until: dict[int, torch.cuda.Event] = {}  # by slot: after the last earlier batch that reads it
        self._written: torch.cuda.Event | None = None  # after the latest write that no batch has waited for

    def begin_batch(self) -> None:
        """Call it before the fills of a batch, in the stream that will compute it."""
        if self._stream is not None:
            self._end_latest()
            self._wait_for_buffers()
            self._computing = torch.cuda.current_stream()

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        """Within, the current stream is the one that may write the slot."""
        if self._stream is None:
            yield
            return
        self._wait_for_buffers()
        if slot in self._read_by_latest:
            self._end_latest()
        if (read_until := self._read_until.pop(slot, None)) is not None:
            self._stream.wait_event(read_until)
        with torch.cuda.stream(self._stream):
            yield
            self._written = torch.cuda.Event()
            self._written.record(self._stream)

    def end_fills(self, slots: Iterable[int]) -> None:
        """Call it before a batch that reads `slots` is launched, in its stream: it waits for all writes so far."""
        if self._stream is None:
            return
        if self._written is not None:
            torch.cuda.current_stream().wait_event(self._written)
            self._written = None
        self._read_by_latest.update(slots)

    def _wait_for_buffers(self) -> None:
        """Before the first batch, what made the buffers may still run."""
        if self._stream is not None and self._computing is None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _end_latest(self) -> None:
        """Note that the latest batch's slots are free once all that its stream has been given so far is done."""
        if self._read_by_latest:
            event = torch.cuda.Event()
            event.record(self._computing)
            self._read_until.update(dict.fromkeys(self._read_by_latest, event))
            self._read_by_latest.clear()
