"""CPU time of one process with all its descendants. It holds on a busy machine, too, where durations do not."""

from __future__ import annotations

import psutil


def process_cpu_s(pid: int) -> float:
    """CPU seconds so far, in user and kernel mode, of a process and the descendants that it has now."""
    process = psutil.Process(pid)
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        total += times.user + times.system
    return total
