"""The sources of workers that cluster.yaml names in `discovery`."""

from __future__ import annotations

from collections.abc import Collection

from cluster.config.discovery import DiscoveryConfig, split_nameserver
from cluster.discovery.source import WorkerSource

ALL_ROLES = ("prefill", "decode", "unified")


def configured_sources(config: DiscoveryConfig, roles: Collection[str] = ALL_ROLES) -> list[WorkerSource]:
    """The source of each of these roles that has one."""
    wanted = [(role, found) for role, found in config.by_role.items() if role in roles]
    if not wanted:
        return []
    from cluster.discovery.dns import DnsSource  # its library is slow to import, and most clusters do not need it

    nameservers = [split_nameserver(each) for each in config.nameservers]
    return [
        DnsSource(found.dns, role, port=found.control_port, interval_s=config.interval_s, nameservers=nameservers)
        for role, found in wanted
    ]
