"""The sources of workers that cluster.yaml names in `discovery`."""

from __future__ import annotations

from collections.abc import Collection

from cluster.config.discovery import DiscoveryConfig, RoleDiscovery, split_nameserver
from cluster.discovery.source import WorkerSource

_NO_PORT = 0  # only hosts are wanted
ALL_ROLES = ("prefill", "decode", "unified")


def configured_sources(
    config: DiscoveryConfig, roles: Collection[str] = ALL_ROLES, *, only_ready: bool = False
) -> list[WorkerSource]:
    """The source of each of these roles that has one.

    `only_ready`: leave out workers that Kubernetes reports as not ready. Peers must find these, or none would become
    ready.
    """
    return [_source(role, discovery, config, only_ready) for role, discovery in config.by_role.items() if role in roles]


def nodes_source(config: DiscoveryConfig, role: str) -> WorkerSource | None:
    """A source of the other nodes of this role's workers, which have no agents. None: the system resolver is enough."""
    found = config.by_role.get(role)
    if found is None or found.nodes_dns is None or not config.nameservers:
        return None
    from cluster.discovery.dns import DnsSource

    nameservers = [split_nameserver(each) for each in config.nameservers]
    return DnsSource(found.nodes_dns, role, port=_NO_PORT, interval_s=config.interval_s, nameservers=nameservers)


def _source(role: str, discovery: RoleDiscovery, config: DiscoveryConfig, only_ready: bool) -> WorkerSource:
    # The libraries of both kinds are slow to import, and most clusters need neither.
    if discovery.kubernetes is not None:
        from cluster.discovery.kubernetes_source import KubernetesSource

        return KubernetesSource(
            discovery.kubernetes,
            role,
            port=discovery.control_port,
            kubeconfig=config.kubeconfig,
            only_ready=only_ready,
        )
    from cluster.discovery.dns import DnsSource

    assert discovery.dns is not None
    return DnsSource(
        discovery.dns,
        role,
        port=discovery.control_port,
        interval_s=config.interval_s,
        nameservers=[split_nameserver(each) for each in config.nameservers],
    )
