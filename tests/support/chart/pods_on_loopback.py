"""The chart's CPU demo on one host: pods have addresses of loopback, and a DNS server the services' records."""

from collections.abc import Iterator
from typing import Any

from support.chart.helm_chart import Object, merged, pods, scenario_values
from support.clusters.dns_server import DnsServer
from support.clusters.running_cluster import is_ready
from support.waiting import wait_until

ADDRESSES = {"router": "127.0.0.10", "prefill": "127.0.0.11", "decode": "127.0.0.12"}
READY_S = 400.0
PORTS = {
    "router": {"http": 18800, "admin": 18801},
    "prefill": {"control": 19900, "metrics": 19901, "engine": 19902, "bootstrap": 19903},
    "decode": {"control": 19910, "metrics": 19911, "engine": 19912, "bootstrap": 19913},
}


def values_for(dns: DnsServer, role_changes: str | bool = False) -> dict[str, Any]:
    for role in ("prefill", "decode"):
        dns.set_addresses(f"r-prelude-{role}.ns.svc.cluster.local", [ADDRESSES[role]])
    discovery = {"nameservers": [f"127.0.0.1:{dns.port}"], "interval_s": 1}
    service = {"service": {"port": PORTS["router"]["http"]}}  # which nothing forwards here
    changes = {"cluster": {"discovery": discovery, "role_changes": role_changes}, "ports": PORTS, "router": service}
    return merged(scenario_values("cpu-demo"), changes)


def components(objects: list[Object]) -> Iterator[tuple[str, dict[str, Any]]]:
    for _, spec, labels in pods(objects):
        component = labels["app.kubernetes.io/component"]
        if component in ADDRESSES:
            yield component, spec


def wait_until_ready() -> None:
    """By the paths and ports of the readiness probes."""
    probed = [(ADDRESSES[each], ports.get("admin", ports.get("metrics"))) for each, ports in PORTS.items()]
    wait_until(lambda: all(is_ready(f"http://{address}:{port}/ready") for address, port in probed), READY_S)
