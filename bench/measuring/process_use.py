"""Memory and descriptors of the processes of a cluster that this process has started."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Use:
    """Of one process, or of all processes of one engine. `pid` is the first one's: another one is another life."""

    pid: int
    mib: float
    descriptors: int


def uses(workers: list[str]) -> dict[str, Use]:
    """By name: the router's, each agent's and each engine's."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            worker = next((name for name in workers if name in words), None)
            if worker is not None:
                found[f"{worker} agent"] = _use([child])
                if engine := child.children(recursive=True):
                    found[f"{worker} engine"] = _use(engine)
            elif "router" in words:
                found["router"] = _use([child, *child.children(recursive=True)])
    return found


def _use(processes: list[psutil.Process]) -> Use:
    mib = sum(each.memory_info().rss for each in processes) / 2**20
    return Use(processes[0].pid, mib, sum(each.num_fds() for each in processes))
