"""Measures how much CPU other processes use during a measurement. Linux only."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

QUIET_CORES = 0.2  # other processes' use of CPU up to which the machine counts as quiet
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)  # of /proc/stat: idle, iowait
_GUEST_FIELDS = (8, 9)  # counted in user and nice as well


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds since a fixed moment; only differences have a meaning."""

    machine_s: float  # of all processes, including time that a hypervisor stole
    own_s: float  # of this process and its descendants, those that have ended included


def cpu_use() -> CpuUse:
    """CPU seconds so far."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy = sum(ticks for number, ticks in enumerate(fields) if number not in _IDLE_FIELDS + _GUEST_FIELDS)
    current = psutil.Process()
    own = 0.0
    for process in (current, *current.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system + times.children_user + times.children_system
    return CpuUse(busy / _TICKS_PER_S, own)


def foreign_cores(before: CpuUse, after: CpuUse, duration_s: float) -> float:
    """Cores that other processes kept busy in between, on average."""
    foreign_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return max(0.0, foreign_s / duration_s)
