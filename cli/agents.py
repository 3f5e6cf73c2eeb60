"""The agents of a cluster, for commands that call them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigError

if TYPE_CHECKING:
    import grpc

    from cluster.config.schema import ClusterConfig
    from cluster.control.transport import Transport


@dataclass(frozen=True, slots=True)
class Agents:
    """Where agents listen, and how they are called."""

    transport: Transport
    addresses: Mapping[str, tuple[str, str]]  # by worker: role and host:port

    def channel(self, name: str) -> grpc.aio.Channel:
        """A new channel to a worker's agent."""
        role, address = self.addresses[name]
        return self.transport.channel(address, role, name)


def agents_of(config: ClusterConfig, path: Path, names: Collection[str]) -> Agents:
    """The agents of these workers, called with the certificate of `operator` if the cluster has `tls`.

    Raises ConfigError for a port that nobody knows, and for a certificate that cannot be used.
    """
    from cluster.config.certificates import check_process
    from cluster.config.load import located
    from cluster.control.transport import Transport
    from cluster.local.running import with_running_ports
    from process.certificates.identity import OPERATOR

    try:
        check_process(config, OPERATOR)
    except ConfigError as error:
        raise located(path, error) from error
    running = with_running_ports(config, path)
    addresses = {}
    for name in names:
        worker = running.workers[name]
        if not worker.control_port:
            raise ConfigError(
                f"{path}: workers.{name}.control_port is 0, and no `prelude up` runs this file that would have chosen "
                "one; start it, or give the worker a fixed port"
            )
        addresses[name] = worker.role, f"{worker.host}:{worker.control_port}"
    return Agents(Transport.of(config, OPERATOR), addresses)
