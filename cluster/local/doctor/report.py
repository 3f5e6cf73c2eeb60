"""All probes of this host, in the order of the report."""

from pathlib import Path

from cluster.config.fields import is_loopback
from cluster.config.load import load_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from cluster.local.doctor import devices, resources, software
from cluster.local.doctor.finding import Finding, Level, Probe, run_probes
from cluster.local.doctor.host import Host

_DEFAULT = Path("cluster.yaml")


def examine(path: Path | None, *, quick: bool, host: Host | None = None) -> list[Finding]:
    """Run all probes. `path`: a cluster.yaml; None: that of this folder, if there is one. Raises nothing for a host."""
    host = host or Host()
    config, broken = _configuration(path)
    findings = broken + quick_findings(config, host)
    if quick or any(each.level is Level.ERROR and each.topic in ("packages", "python") for each in findings):
        return findings  # what imports SGLang and NIXL would only fail
    device = "cuda" if host.names("/proc/driver/nvidia/gpus") and (config is None or _wants_gpus(config)) else "cpu"
    # After the others, and one after the other: it measures.
    findings += run_probes([Probe("kv", lambda: software.transfer(host, device=device), software.TRANSFER_S)])
    return findings + run_probes([Probe("hooks", lambda: software.hooks(host, device=device), software.HOOKS_S)])


def quick_findings(config: ClusterConfig | None, host: Host | None = None) -> list[Finding]:
    """What can be found without importing SGLang and NIXL."""
    host = host or Host()
    wants_gpus = config is not None and _wants_gpus(config)
    hosts = {worker.host for worker in config.workers.values() if not is_loopback(worker.host)} if config else set()
    has_gpus = bool(host.names("/proc/driver/nvidia/gpus"))
    has_rdma = bool(host.names("/sys/class/infiniband"))
    probes = [
        Probe("python", software.python),
        Probe("packages", lambda: software.packages(host, device="cuda" if wants_gpus else "cpu")),
        Probe("gpu", lambda: devices.gpus(host, needed=wants_gpus), 45),
        Probe("rdma", lambda: devices.rdma(host, needed=len(hosts) > 1)),
        Probe("memory", lambda: resources.memory(host, config)),
        Probe("shm", lambda: resources.shared_memory(host, config)),
        Probe("limits", lambda: resources.limits(locks_memory=has_rdma)),
        Probe("ports", lambda: resources.ports(config)),
        Probe("adapters", lambda: resources.adapters(config)),
    ]
    if has_gpus and (config is None or wants_gpus):
        probes.insert(3, Probe("compilers", lambda: devices.compilers(host)))
    return run_probes(probes)


def _wants_gpus(config: ClusterConfig) -> bool:
    engines = [config.engine_of(name) for name in config.workers] or [config.engine]
    return any(each.device == "cuda" for each in engines)


def _configuration(path: Path | None) -> tuple[ClusterConfig | None, list[Finding]]:
    if path is None and not _DEFAULT.exists():
        return None, []
    try:
        return load_cluster_config(path or _DEFAULT), []
    except ConfigError as failure:
        return None, [Finding(Level.ERROR, str(failure), "correct the file", "config")]
