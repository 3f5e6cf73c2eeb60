"""Where the agents of a cluster listen, for commands that call them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config.schema import ClusterConfig


def agent_addresses(config: ClusterConfig, path: Path, names: Collection[str]) -> dict[str, str]:
    """`host:port` of these workers' agents, by worker. Raises ConfigError for a port that nobody knows."""
    from cluster.local.running import with_running_ports

    running = with_running_ports(config, path)
    addresses = {}
    for name in names:
        worker = running.workers[name]
        if not worker.control_port:
            raise ConfigError(
                f"{path}: workers.{name}.control_port is 0, and no `prelude up` runs this file that would have chosen "
                "one; start it, or give the worker a fixed port"
            )
        addresses[name] = f"{worker.host}:{worker.control_port}"
    return addresses
