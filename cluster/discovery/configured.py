"""The sources of workers that cluster.yaml names in `discovery`."""

from __future__ import annotations

from collections.abc import Collection

from cluster.config.schema import DiscoveryConfig, split_nameserver
from cluster.discovery.source import WorkerSource

ALL_ROLES = ("prefill", "decode", "unified")


def configured_sources(config: DiscoveryConfig, roles: Collection[str] = ALL_ROLES) -> list[WorkerSource]:
    """A source for each of these roles that has one."""
    found: list[WorkerSource] = []
    for role, discovery in config.by_role.items():
        if role in roles:
            from cluster.discovery.dns import DnsSource  # its library is slow to import

            source = DnsSource(
                discovery.dns,
                role,
                port=discovery.control_port,
                interval_s=config.interval_s,
                nameservers=[split_nameserver(each) for each in config.nameservers],
            )
            found.append(source)
    return found
