"""Lays workers over the GPUs of this host.

GPUs are listed by `nvidia-smi`, which comes with the driver; if the driver hangs, this process does not.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config.schema import ClusterConfig
from cluster.config.workers import WorkerConfig
from cluster.errors import StartError
from cluster.local.doctor.host import Host

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0  # a driver that is not in persistence mode takes seconds per GPU to wake up


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as nvidia-smi shows it."""

    index: int
    uuid: str
    name: str = ""
    memory_bytes: int | None = None  # None: the driver does not say


@dataclass(frozen=True, slots=True)
class HostGpus:
    """The GPUs that this process may use, in order of preference."""

    gpus: tuple[Gpu, ...]
    note: str = ""  # why there are not more, in words; may be empty

    def __str__(self) -> str:
        names = ", ".join(str(gpu.index) for gpu in self.gpus)
        shown = f"{len(self.gpus)} ({names})" if self.gpus else "none"
        return f"{shown}{f': {self.note}' if self.note else ''}"


def with_host_gpus(config: ClusterConfig, host: str | None = None) -> ClusterConfig:
    """The configuration with the GPUs of every worker by index, if a worker has `gpus`; else unchanged.

    `host`: of the workers with this `host` only; None: of all. Raises StartError. May block for seconds.
    """
    if not _workers_on_gpus(config, host):
        return config
    return lay_out(config, list_gpus(os.environ), host)


def lay_out(config: ClusterConfig, available: HostGpus, host: str | None = None) -> ClusterConfig:
    """Give every worker its own GPUs: those that it lists, else the next free ones. Raises StartError."""
    workers = _workers_on_gpus(config, host)
    sizes = {name: config.engine_of(name).tensor_parallel for name in workers}
    if (total := sum(sizes.values())) > len(available.gpus):
        raise StartError(
            f"workers ask for {total} GPUs ({_arithmetic(workers, sizes)}); this host has {available}. "
            "Ask for fewer in `gpus`, `tensor_parallel` and `replicas`, or start fewer workers"
        )
    owner: dict[int, str] = {}
    chosen = {name: _named(name, worker.gpus, available) for name, worker in workers.items()}
    for name, gpus in chosen.items():
        for gpu in gpus:
            if gpu.index in owner:
                raise StartError(
                    f"workers.{name}.gpus: GPU {gpu.index} is also that of worker {owner[gpu.index]}; name another. "
                    "(Without any `gpus` in the file, all workers share the first ones)"
                )
            owner[gpu.index] = name
    free = iter([gpu for gpu in available.gpus if gpu.index not in owner])
    for name, size in sizes.items():
        chosen[name] = chosen[name] or tuple(next(free) for _ in range(size))
    placed = {
        name: worker.model_copy(
            update={"gpus": tuple(gpu.index for gpu in chosen[name]), "tensor_parallel": sizes[name]}
        )
        for name, worker in workers.items()
    }
    return config.model_copy(update={"workers": {**config.workers, **placed}})


def list_gpus(environment: Mapping[str, str], command: tuple[str, ...] = _QUERY) -> HostGpus:
    """The GPUs of this host that CUDA_VISIBLE_DEVICES leaves. Raises StartError if the driver fails or hangs."""
    if shutil.which(command[0]) is None:
        return HostGpus(
            (),
            f"{command[0]} was not found; it comes with NVIDIA's driver, in containers with "
            "NVIDIA_DRIVER_CAPABILITIES=utility",
        )
    status, output = Host().run(*command, timeout_s=_TIMEOUT_S)
    if status != 0 and "No devices" not in output:
        failed = "" if status is None else f"{command[0]} failed: "
        raise StartError(f"this host's GPUs cannot be listed: {failed}{output.strip()[-300:]}; look at the driver")
    gpus = tuple(gpu for line in output.splitlines() if (gpu := _gpu_of(line)))
    return _visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))


def _gpu_of(line: str) -> Gpu | None:
    """One line of nvidia-smi's answer; None if it is a message."""
    fields = [field.strip() for field in line.split(",", 3)]
    if len(fields) < 4 or not fields[0].isdecimal() or not fields[1].startswith("GPU-"):
        return None
    mebibytes = int(fields[2]) if fields[2].isdecimal() else None
    return Gpu(int(fields[0]), fields[1], fields[3], mebibytes and mebibytes * 1024**2)


def _visible(gpus: tuple[Gpu, ...], restriction: str | None) -> HostGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES permits, in its order. Like CUDA, ends at the first entry that is no GPU."""
    if restriction is None:
        return HostGpus(gpus)
    kept: list[Gpu] = []
    for entry in restriction.split(","):
        gpu = _find(entry.strip(), gpus)
        if gpu is None or gpu in kept:
            break
        kept.append(gpu)
    return HostGpus(tuple(kept), f"CUDA_VISIBLE_DEVICES={restriction} leaves these of {len(gpus)}")


def _find(name: int | str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU with this index, or with a UUID that begins so."""
    text = str(name)
    if text.startswith("GPU-"):
        return next((gpu for gpu in gpus if gpu.uuid.startswith(text)), None)
    return next((gpu for gpu in gpus if text == str(gpu.index)), None)


def _named(worker: str, names: int | tuple[int | str, ...] | None, available: HostGpus) -> tuple[Gpu, ...]:
    """The GPUs that a worker lists; none if it asks for a number of GPUs."""
    found = []
    for name in names if isinstance(names, tuple) else ():
        gpu = _find(name, available.gpus)
        if gpu is None:
            raise StartError(f"workers.{worker}.gpus: there is no GPU {name}; this host has {available}")
        found.append(gpu)
    return tuple(found)


def _workers_on_gpus(config: ClusterConfig, host: str | None) -> dict[str, WorkerConfig]:
    """The workers that get GPUs of their own: all on `device: cuda`, if one of them has `gpus`."""
    workers = {
        name: worker
        for name, worker in config.workers.items()
        if host in (None, worker.host) and config.engine_of(name).device == "cuda"
    }
    return workers if any(worker.gpus is not None for worker in workers.values()) else {}


def _arithmetic(workers: Mapping[str, WorkerConfig], sizes: Mapping[str, int]) -> str:
    """Such as `prefill 1 x 2, decode 3 x 1`: workers of a role times the GPUs of each."""
    counts: dict[tuple[str, int], int] = {}
    for name, worker in workers.items():
        counts[worker.role, sizes[name]] = counts.get((worker.role, sizes[name]), 0) + 1
    return ", ".join(f"{role} {count} x {size}" for (role, size), count in counts.items())
