"""The agents of a cluster, for commands that call them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from process.addresses import host_and_port

if TYPE_CHECKING:
    import grpc

    from cluster.config.schema import ClusterConfig
    from cluster.control.transport import Transport


@dataclass(frozen=True, slots=True)
class Agents:
    """Where agents listen, and how they are called: those of cluster.yaml, and those that its sources find now."""

    transport: Transport
    addresses: Mapping[str, tuple[str, str]]  # by worker: role and host:port
    problems: Mapping[str, str]  # of what was found and cannot be used, by source or address

    def channel(self, name: str) -> grpc.aio.Channel:
        """A new channel to a worker's agent."""
        role, address = self.addresses[name]
        return self.transport.channel(address, role, name)


def agents_of(
    config: ClusterConfig, path: Path, names: Collection[str] | None, *, holds_adapters: bool = False
) -> Agents:
    """The agents of these workers (None: of all, or of all that hold adapters), called as `operator` if there is `tls`.

    Sources are asked only if a name is not in the file. Raises ConfigError for a name or a port that nobody knows, and
    for a certificate that cannot be used.
    """
    from cluster.config.certificates import check_process
    from cluster.config.load import located
    from cluster.control.transport import Transport
    from process.certificates.identity import OPERATOR

    with located(path):
        check_process(config, OPERATOR)
    transport = Transport.of(config, OPERATOR)
    roles = ("prefill", "unified") if holds_adapters else ("prefill", "decode", "unified")
    listed = {name: worker for name, worker in config.workers.items() if config.may_be(worker.role, *roles)}
    wanted = list(listed if names is None else names)
    unlisted = [name for name in wanted if name not in listed]
    found: dict[str, tuple[str, str]] = {}
    problems: Mapping[str, str] = {}
    if config.discovery.by_role and (names is None or unlisted):
        from cluster.discovery.configured import found_workers

        answer = asyncio.run(found_workers(config, transport))
        found = {
            name: (endpoint.role, endpoint.address)
            for name, endpoint in answer.endpoints.items()
            if config.may_be(endpoint.role, *roles)
        }
        problems = answer.problems if names is None else {}
    for name in unlisted:
        if name not in found:
            known = ", ".join([*listed, *found]) or "none"
            raise ConfigError(f"{path}: there is no worker called {name!r}; there is {known}")
    chosen = found if names is None else {name: found[name] for name in unlisted}
    return Agents(transport, _addresses(config, path, [name for name in wanted if name in listed]) | chosen, problems)


def _addresses(config: ClusterConfig, path: Path, names: Collection[str]) -> dict[str, tuple[str, str]]:
    """Role and `host:port` of workers of cluster.yaml. Raises ConfigError for a port that nobody knows."""
    from cluster.local.running import with_running_ports

    running = with_running_ports(config, path)
    addresses: dict[str, tuple[str, str]] = {}
    for name in names:
        worker = running.workers[name]
        if not worker.control_port:
            raise ConfigError(
                f"{path}: workers.{name}.control_port is 0, and no `prelude up` runs this file that would have chosen "
                "one; start it, or give the worker a fixed port"
            )
        addresses[name] = worker.role, host_and_port(worker.host, worker.control_port)
    return addresses
