"""Probes of memory, limits and ports, against what cluster.yaml asks for."""

import os
import resource
from collections.abc import Iterator

from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError, StartError
from cluster.host_memory import available_bytes, check_host_bytes, gib, holders_of
from cluster.local.doctor.finding import Finding, error, ok, warning
from cluster.local.doctor.host import Host
from cluster.local.ports import check_free
from process.addresses import host_and_port

_MIN_FILES = 65536  # connections of clients, engines and agents, with room
_ENGINE_SHARED_BYTES = 1 << 30  # of one engine and its ranks: queues, UCX segments


def shared_memory(host: Host, config: ClusterConfig | None) -> Iterator[Finding]:
    """/dev/shm: residency.host_bytes of each worker that holds adapters, and engines' own segments."""
    folder = host.path("/dev/shm")
    try:
        stat = os.statvfs(folder)
    except OSError as failure:
        yield error(f"/dev/shm cannot be used: {failure.strerror}", "mount a tmpfs there; docker: --shm-size")
        return
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    text = f"/dev/shm has {gib(free)} free of {gib(total)}"
    if config is None:
        least = _ENGINE_SHARED_BYTES
        text += "; no cluster.yaml to compare it with"
    else:
        try:
            check_host_bytes(config, folder)
        except StartError as failure:
            yield error(
                str(failure), "lower residency.host_bytes, or docker --shm-size, or a larger emptyDir of memory"
            )
            return
        holders = holders_of(config)
        given = "host_bytes" in config.residency.model_fields_set
        each = config.residency.host_bytes if given else min(config.residency.host_bytes, total // max(1, len(holders)))
        least = each * len(holders) + _ENGINE_SHARED_BYTES
        text += f"; adapters may take {gib(each)} in each of {len(holders)} workers"
    if free < least:
        yield warning(text, f"{gib(least)} would be enough: remove what is there, or lower residency.host_bytes")
    else:
        yield ok(text)


def memory(host: Host, config: ClusterConfig | None) -> Iterator[Finding]:
    """What is available, against residency.host_bytes of all workers: shared memory is memory, too."""
    fields = dict(line.split(":", 1) for line in host.read("/proc/meminfo").splitlines() if ":" in line)
    free = available_bytes(host.root)
    if free is None:
        yield warning("/proc/meminfo cannot be read", "mount /proc")
        return
    total = fields.get("MemTotal", "0").split()
    text = f"host memory: {gib(free)} available of {gib(int(total[0]) * 1024)}"
    given = config is not None and "host_bytes" in config.residency.model_fields_set
    adapters = config.residency.host_bytes * len(holders_of(config)) if config is not None and given else 0
    if adapters > free:
        yield warning(
            f"{text}; adapters may take {gib(adapters)} of it",
            "lower residency.host_bytes, or end what else uses the memory: the kernel kills engines when it is short",
        )
    else:
        yield ok(text)


def limits(*, locks_memory: bool) -> Iterator[Finding]:
    """`locks_memory`: RDMA devices are there, whose transfers lock their memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_FILES:
        yield warning(
            f"nofile: {soft} (hard {hard})", f"a router with many clients needs {_MIN_FILES}: ulimit -n, LimitNOFILE"
        )
    else:
        yield ok(f"nofile: {_shown(soft)} (hard {_shown(hard)})")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locks_memory and soft != resource.RLIM_INFINITY:
        yield warning(
            f"memlock: {gib(soft)}", "RDMA registers (locks) the KV cache: ulimit -l unlimited, LimitMEMLOCK=infinity"
        )
    else:
        yield ok(f"memlock: {'unlimited' if soft == resource.RLIM_INFINITY else gib(soft)}")


def ports(config: ClusterConfig | None) -> Iterator[Finding]:
    """Whether the ports that cluster.yaml names are free. Those of a cluster that runs here are not."""
    if config is None:
        yield ok("no cluster.yaml, so no ports to look at")
        return
    try:
        check_free(config)
    except ConfigError as failure:
        yield warning(str(failure), "another process has it, or this cluster runs already: `ss -ltnp` shows which")
    else:
        yield ok(
            f"the ports of cluster.yaml are free (router: {host_and_port(config.router.host, config.router.port)})"
        )


def adapters(config: ClusterConfig | None) -> Iterator[Finding]:
    """Whether cluster.yaml's adapters are there. One that was imported is served without its folder, too."""
    for name, adapter in config.adapters.items() if config else ():
        if not adapter.path.is_dir():
            yield warning(f"adapters.{name}.path: there is no folder {adapter.path}", "correct it, or remove the entry")


def _shown(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
