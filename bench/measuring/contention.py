"""Measures how much CPU other processes use during a measurement. Linux only."""

from dataclasses import dataclass

import psutil

QUIET_CORES = 0.2  # other processes' use of CPU up to which the machine counts as quiet


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds since a fixed moment; only differences have a meaning."""

    machine_s: float  # of all processes, including time that a hypervisor stole
    own_s: float  # of this process and its descendants, those that have ended included


def cpu_use() -> CpuUse:
    """CPU seconds so far."""
    machine = psutil.cpu_times()  # guests are counted in user and nice as well
    busy_s = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    current = psutil.Process()
    own = 0.0
    for process in (current, *current.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system + times.children_user + times.children_system
    return CpuUse(busy_s, own)


def foreign_cores(before: CpuUse, after: CpuUse, duration_s: float) -> float:
    """Cores that other processes kept busy in between, on average."""
    foreign_s = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return max(0.0, foreign_s / duration_s)
