"""Whether the models in a GPU's memory leave enough of it for the next command."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SPARE = 32  # one part in so many stays free: memory is in pieces


class DeviceMemory:
    """Of the device that computes. On a CPU nothing is measured, and never is too little free."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most_bytes = 0  # that a command has taken, so far

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around a command: what it takes at most, another may take."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            yield
        finally:
            self._most_bytes = max(self._most_bytes, torch.cuda.max_memory_allocated(self._device) - before)

    @property
    def left_bytes(self) -> int:
        """What is free for more models, beside a command; less than 0 if a command may not fit any more."""
        free, total = torch.cuda.mem_get_info(self._device)  # other processes use it, too
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + cached - self._most_bytes - total // _SPARE

    def is_short(self) -> bool:
        return self._device.type == "cuda" and self.left_bytes < 0
