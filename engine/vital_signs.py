"""Signs of life of an engine's processes and threads: counters in small shared files, one per part of the engine.

The engine's side counts (hooks in `engine/hooks/inspection.py`), its agent reads (`engine/hang_watch.py`). A part is
`scheduler-<rank>`, `detokenizer` or `kv-<rank>`: the thread of a prefill engine that takes decode engines' messages.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

_NUM_FIELDS = 4  # of 8 bytes, each written by one thread only
_ANSWERED, _ASKED, _BATCHES, _PID = range(_NUM_FIELDS)


class Vitals:
    """One part's counters, mapped into this process. Writing them takes no system call."""

    def __init__(self, folder: Path, part: str) -> None:
        descriptor = os.open(folder / f"{part}.vitals", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _NUM_FIELDS * 8)
            self._fields = memoryview(mmap.mmap(descriptor, _NUM_FIELDS * 8)).cast("Q")
        finally:
            os.close(descriptor)

    def live(self) -> None:
        """Count a pass of the part's loop, or an answer to `ask`."""
        self._fields[_ANSWERED] += 1

    def ran_batch(self) -> None:
        """Count a batch that a scheduler begins."""
        self._fields[_BATCHES] += 1

    def is_in_process(self, pid: int) -> None:
        """Record the process that the part runs in."""
        self._fields[_PID] = pid

    def ask(self) -> bool:
        """Count a question to a part that sleeps until it is asked; False while it owes the answer to the last one."""
        if self._fields[_ASKED] > self._fields[_ANSWERED]:
            return False
        self._fields[_ASKED] = self._fields[_ANSWERED] + 1
        return True


@dataclass(frozen=True, slots=True)
class Reading:
    """What a part has counted."""

    num_signs: int = 0  # passes of a loop, or answers
    owes_answer: bool = False
    num_batches: int = 0
    pid: int = 0  # 0: not known yet


def read_vitals(folder: Path, part: str) -> Reading:
    """A part's counters; zeros before it has counted anything."""
    try:
        fields = memoryview((folder / f"{part}.vitals").read_bytes()).cast("Q")
        owes_answer = fields[_ASKED] > fields[_ANSWERED]
        return Reading(fields[_ANSWERED], owes_answer, fields[_BATCHES], fields[_PID])
    except (FileNotFoundError, IndexError, TypeError):  # not there, or being made
        return Reading()
