"""The sources of workers that cluster.yaml names in `discovery`."""

from __future__ import annotations

from collections.abc import Collection

from cluster.config.discovery import DiscoveryConfig, split_nameserver
from cluster.discovery.source import WorkerSource

_NO_PORT = 0  # only hosts are wanted
ALL_ROLES = ("prefill", "decode", "unified")


def configured_sources(config: DiscoveryConfig, roles: Collection[str] = ALL_ROLES) -> list[WorkerSource]:
    """The source of each of these roles that has one."""
    return [
        _source(found.dns, role, found.control_port, config) for role, found in config.by_role.items() if role in roles
    ]


def nodes_source(config: DiscoveryConfig, role: str) -> WorkerSource | None:
    """A source of the other nodes of this role's workers, which have no agents. None: the system resolver is enough."""
    found = config.by_role.get(role)
    if found is None or found.nodes_dns is None or not config.nameservers:
        return None
    return _source(found.nodes_dns, role, _NO_PORT, config)


def _source(name: str, role: str, port: int | None, config: DiscoveryConfig) -> WorkerSource:
    from cluster.discovery.dns import DnsSource  # its library is slow to import, and most clusters do not need it

    nameservers = [split_nameserver(each) for each in config.nameservers]
    return DnsSource(name, role, port=port, interval_s=config.interval_s, nameservers=nameservers)
