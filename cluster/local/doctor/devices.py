"""Probes of GPUs and RDMA devices."""

import re
import shutil
import sysconfig
from collections.abc import Iterator

from cluster.local.doctor.finding import Finding, error, ok, warning
from cluster.local.doctor.host import Host

_QUERY_S = 20.0  # a driver that is not in persistence mode takes seconds per GPU to wake up
_CUDA_MAJOR = 13  # of the wheels in requirements/gpu.txt


def gpus(host: Host, *, needed: bool) -> Iterator[Finding]:
    """Driver, CUDA and GPUs. `needed`: cluster.yaml says `device: cuda`."""
    level = error if needed else warning
    status, output = host.run("nvidia-smi", timeout_s=_QUERY_S)
    if status is None and "did not end" in output:
        yield error(output, "the driver hangs: look at dmesg for Xid lines, then restart the host")
        return
    if status is None:
        hardware = any(host.read(f"/sys/bus/pci/devices/{name}/vendor") == "0x10de" for name in _display(host))
        if hardware:
            yield level(
                "there is an NVIDIA GPU, and no nvidia-smi",
                "install NVIDIA's driver; in a container, start it with --gpus all and "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        elif needed:
            yield error("no GPU, and cluster.yaml says `device: cuda`", "use a GPU host, or `engine: {device: cpu}`")
        else:
            yield ok("no GPU; engines run on the CPU")
        return
    if status != 0:
        yield level(
            f"nvidia-smi failed: {_last_line(output)}", "load the driver (modprobe nvidia), or restart the host"
        )
        return
    driver = _first(r"Driver Version: *([\d.]+)", output)
    cuda = _first(r"CUDA (?:UMD )?Version: *([\d.]+)", output)
    text = f"driver {driver or 'of unknown release'}, CUDA {cuda or 'unknown'}"
    if cuda and int(cuda.split(".")[0]) < _CUDA_MAJOR:
        yield level(text, f"the GPU build needs CUDA {_CUDA_MAJOR}: install driver 580 or newer")
    else:
        yield ok(text)
    _, listed = host.run(
        "nvidia-smi", "--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits",
        timeout_s=_QUERY_S,
    )  # fmt: skip
    num_gpus = 0
    for line in listed.splitlines():
        fields = [each.strip() for each in line.split(",")]
        if len(fields) != 4 or not fields[0].isdecimal():
            continue
        num_gpus += 1
        index, name, total, used = fields
        text = f"GPU {index}: {name}, {total} MiB, {used} MiB in use"
        if used.isdecimal() and total.isdecimal() and int(used) > int(total) // 10:
            yield warning(text, "another process holds memory there: see nvidia-smi, or give workers other `gpus`")
        else:
            yield ok(text)
    if not num_gpus:
        yield level("the driver lists no GPU", "in a container, start it with --gpus all")


def compilers(host: Host) -> Iterator[Finding]:
    """The compilers for kernels at the first start: Triton needs a C compiler and Python's headers, others nvcc."""
    include = sysconfig.get_path("include")
    missing = [] if _has(host, "gcc") or _has(host, "cc") else ["a C compiler"]
    if not host.path(f"{include}/Python.h").exists():
        missing.append(f"{include}/Python.h")
    if missing:
        yield error(f"Triton cannot compile: no {' and no '.join(missing)}", "install gcc and python3-dev")
    if _has(host, "nvcc") or host.path("/usr/local/cuda/bin/nvcc").exists():
        yield ok("nvcc is there for kernels that are compiled at the first start")
    else:
        yield warning(
            "no nvcc",
            "install CUDA 13's toolkit, or start engines with --attention-backend triton --sampling-backend pytorch",
        )


def rdma(host: Host, *, needed: bool) -> Iterator[Finding]:
    """InfiniBand and RoCE devices. `needed`: workers of cluster.yaml are on several hosts."""
    devices = host.names("/sys/class/infiniband")
    if not devices:
        if needed:
            yield warning(
                "no RDMA device, and workers are on several hosts",
                "KV goes over TCP there: install the NIC's driver; in a Pod, request its RDMA device resource",
            )
        else:
            yield ok("no RDMA device; KV within this host needs none")
        return
    for device in devices:
        ports = host.names(f"/sys/class/infiniband/{device}/ports")
        states = [host.read(f"/sys/class/infiniband/{device}/ports/{port}/state") for port in ports]
        rates = {host.read(f"/sys/class/infiniband/{device}/ports/{port}/rate") for port in ports}
        layers = {host.read(f"/sys/class/infiniband/{device}/ports/{port}/link_layer") for port in ports}
        kind, rate = (", ".join(sorted(each - {""})) for each in (layers, rates))
        text = f"{device}: {kind or 'RDMA'}, {rate or 'rate unknown'}"
        if any("ACTIVE" in state for state in states):
            yield ok(text)
        else:
            yield warning(f"{text}: no port is active", "look at the cable, the switch and `ip link`")
    if not any(name.startswith("uverbs") for name in host.names("/dev/infiniband")):
        yield error(
            "no /dev/infiniband/uverbs*: programs cannot use the RDMA devices",
            "load ib_uverbs; in a container, pass --device /dev/infiniband, in a Pod request the RDMA device resource",
        )


def _display(host: Host) -> list[str]:
    folder = "/sys/bus/pci/devices"
    return [name for name in host.names(folder) if host.read(f"{folder}/{name}/class").startswith("0x03")]


def _has(host: Host, program: str) -> bool:
    return shutil.which(program, path=host.environment.get("PATH", "")) is not None


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
