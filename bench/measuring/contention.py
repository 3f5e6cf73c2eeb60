"""How much of the machine somebody else used while we measured. Linux only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)  # of /proc/stat: idle, iowait
_GUEST_FIELDS = (8, 9)  # counted in user and nice as well


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds since some moment before."""

    machine_s: float  # of all processes, and what a hypervisor took away
    own_s: float  # of this process and its descendants


def cpu_use() -> CpuUse:
    """CPU seconds so far."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy = sum(ticks for number, ticks in enumerate(fields) if number not in _IDLE_FIELDS + _GUEST_FIELDS)
    this = psutil.Process()
    own = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system
    return CpuUse(busy / _TICKS_PER_S, own)


def foreign_cores(before: CpuUse, after: CpuUse, duration_s: float) -> float:
    """The cores that others kept busy in between, on average."""
    foreign_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return max(0.0, foreign_s / duration_s)
