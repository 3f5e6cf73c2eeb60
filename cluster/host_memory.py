"""How much shared memory the workers of a host may use: `residency.host_bytes` of each that holds adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster.config.schema import ClusterConfig, ResidencyConfig
from cluster.errors import StartError

GIB = 1024**3
SHARED_MEMORY = Path("/dev/shm")


def with_fitted_default(settings: ResidencyConfig, num_workers: int, folder: Path = SHARED_MEMORY) -> ResidencyConfig:
    """The settings, with a `host_bytes` that cluster.yaml does not set lowered to a worker's share of the memory."""
    share = shutil.disk_usage(folder).total // max(1, num_workers)
    if "host_bytes" in settings.model_fields_set or settings.host_bytes <= share:
        return settings
    fitted = settings.model_copy(update={"host_bytes": share})
    fitted.model_fields_set.discard("host_bytes")
    return fitted


def check_host_bytes(config: ClusterConfig, folder: Path = SHARED_MEMORY) -> None:
    """Raise StartError if all workers of the cluster, on one host, were given more shared memory than it has."""
    names = [name for name, worker in config.workers.items() if worker.holds_adapters]
    each, total = config.residency.host_bytes, shutil.disk_usage(folder).total
    if "host_bytes" not in config.residency.model_fields_set or each * len(names) <= total:
        return
    raise StartError(
        f"residency.host_bytes is {gib(each)} for each worker that holds adapters: {len(names)} x {gib(each)} = "
        f"{gib(each * len(names))} ({', '.join(names)}), and {folder} has {gib(total)}; set it to at most "
        f"{total // len(names)}, or give this host more shared memory"
    )


def gib(num_bytes: float) -> str:
    """Bytes as text, such as `1.5 GiB`; small numbers in MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if abs(num_bytes) >= GIB / 10 else f"{num_bytes / 1024**2:.1f} MiB"
