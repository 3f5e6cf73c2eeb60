"""The IP addresses that discovery names for one role, for a process that asks nobody there who they are."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable

from cluster.config.discovery import DiscoveryConfig
from cluster.discovery.configured import configured_sources, nodes_source
from cluster.discovery.source import keep_following


class FoundHosts:
    """Follows the sources of one role. Known addresses stay while a source does not answer."""

    def __init__(self, config: DiscoveryConfig, role: str, on_change: Callable[[frozenset[str]], None]) -> None:
        """`on_change`: told all addresses, of agents and of the other nodes of engines, whenever they have changed."""
        nodes = nodes_source(config, role)
        self._sources = [*configured_sources(config, (role,)), *([nodes] if nodes is not None else [])]
        self._on_change = on_change
        self._hosts: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Follow them until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(keep_following(source, self._update), name=f"source {source.label}")

    def _update(self) -> None:
        hosts = set()
        for source in self._sources:
            for endpoint in source.endpoints:
                with contextlib.suppress(ValueError):
                    hosts.add(str(ipaddress.ip_address(endpoint.host)))
        if hosts != self._hosts:
            self._on_change(frozenset(hosts))
            self._hosts = frozenset(hosts)
