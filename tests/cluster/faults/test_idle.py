"""With no requests, all processes together use next to nothing."""

import time

import psutil
from support.clusters.running_cluster import RunningCluster

WINDOW_S = 5.0
MAX_CORES = 0.15


def cpu_s(cluster: RunningCluster) -> float:
    total = 0.0
    for process in (cluster.supervisor, *cluster.supervisor.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def test_idle_is_idle(cluster: RunningCluster):
    time.sleep(1.0)
    before, started_at = cpu_s(cluster), time.monotonic()
    time.sleep(WINDOW_S)
    cores = (cpu_s(cluster) - before) / (time.monotonic() - started_at)
    names = [process.name() for process in psutil.Process(cluster.supervisor.pid).children(recursive=True)]
    print(f"{len(names)} processes use {cores:.3f} of a core")
    assert cores <= MAX_CORES
