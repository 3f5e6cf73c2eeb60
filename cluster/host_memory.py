"""How much memory a host has for its processes, and how much shared memory for its workers' adapters."""

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from cluster.config.schema import ClusterConfig, ResidencyConfig
from cluster.errors import StartError

GIB = 1024**3
SHARED_MEMORY = Path("/dev/shm")


def available_bytes(root: Path = Path("/")) -> int | None:
    """What new processes can use: the kernel's estimate, or less where a control group (a container) allows less.

    None: /proc does not say. `root`: of another host's files, for tests.
    """
    meminfo = _numbers(root / "proc/meminfo")
    if "MemAvailable:" not in meminfo:
        return None
    return max(0, min([meminfo["MemAvailable:"] * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What the limit of each control group that this process is in leaves. What can be dropped counts as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, names, dropped = root / "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            dropped = "total_inactive_file"
        else:
            continue
        for path in (PurePosixPath(group), *PurePosixPath(group).parents):
            folder = top / str(path).lstrip("/")
            try:
                limit, used = (int((folder / name).read_text()) for name in names)
            except (OSError, ValueError):  # it has no limit, or is not seen from inside of the container
                continue
            yield limit - used + _numbers(folder / "memory.stat").get(dropped, 0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; none if the file cannot be read."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def part_for_adapters(shared_bytes: int, free_bytes: int, num_workers: int) -> int:
    """Bytes of shared memory for the adapters of each worker: of half of it, or of a quarter of what is free."""
    return min(shared_bytes // 2, free_bytes // 4) // num_workers


def with_fitted_default(settings: ResidencyConfig, num_workers: int, folder: Path = SHARED_MEMORY) -> ResidencyConfig:
    """The settings, with a `host_bytes` that cluster.yaml does not set fitted to this host.

    A worker gets what `prelude init` would give it, but at least the schema's default, if its part of all shared memory
    has room for that.
    """
    if "host_bytes" in settings.model_fields_set:
        return settings
    total, num_workers = shutil.disk_usage(folder).total, max(1, num_workers)
    part = part_for_adapters(total, available_bytes() or 0, num_workers)
    fitted = settings.model_copy(update={"host_bytes": min(max(settings.host_bytes, part), total // num_workers)})
    fitted.model_fields_set.discard("host_bytes")
    return fitted


def holders_of(config: ClusterConfig) -> list[str]:
    """The names of the workers that hold adapters."""
    return [name for name, worker in config.workers.items() if worker.holds_adapters]


def check_host_bytes(config: ClusterConfig, folder: Path = SHARED_MEMORY) -> None:
    """Raise StartError if all workers of the cluster, on one host, were given more shared memory than it has."""
    names = holders_of(config)
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
