"""A worker's peers, the other ends of its KV transfers: those of cluster.yaml, and those that discovery finds."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterator, Mapping

from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.transport import Transport
from cluster.control.worker_watch import WorkerWatch
from cluster.discovery.configured import configured_sources
from cluster.discovery.roster import Contact, Roster
from cluster.discovery.source import StaticList
from process.addresses import host_and_port
from process.exhaustion import is_exhaustion

_AGAIN_S = 1.0

log = logging.getLogger(__name__)


class Peer(WorkerWatch):
    """One peer."""

    def __init__(self, contact: Contact, on_change: Callable[[WorkerWatch], None], transport: Transport) -> None:
        endpoint = contact.endpoint
        super().__init__(contact.name, endpoint.address, on_change, role=endpoint.role, transport=transport)
        self._contact = contact

    @property
    def found_host(self) -> str:
        """The peer's IP address if discovery found it and its description was accepted, else empty."""
        if self._contact.is_listed or not self._contact.name:
            return ""
        try:
            return str(ipaddress.ip_address(self._contact.endpoint.host))
        except ValueError:
            return ""

    def described(self, description: pb.WorkerDescription) -> None:
        self.name = self._contact.endpoint.name or description.name
        self._contact.describe(description)

    def lost(self) -> None:
        self._contact.lost()

    async def until_unused(self) -> None:
        """Returns at once: a warm-up notices by itself that its peer has left."""


class Peers(Mapping[str, Peer]):
    """The peers by name. A worker that comes back at another address is a new peer."""

    def __init__(
        self,
        config: ClusterConfig,
        role: str | None,  # None: there are none
        transport: Transport,
        *,
        on_change: Callable[[WorkerWatch], None],
        on_leave: Callable[[str], None],  # told the name
        on_hosts: Callable[[frozenset[str]], None],  # told the IP addresses of all that were found and accepted
    ) -> None:
        self._transport = transport
        self._on_change = on_change
        self._on_leave = on_leave
        self._on_hosts = on_hosts
        self._hosts: frozenset[str] = frozenset()
        self._followed: set[Peer] = set()
        self._members: dict[str, Peer] = {}
        self._changed = asyncio.Event()  # set and replaced whenever somebody comes or leaves
        listed = config.workers_of(role) if role else {}
        addresses = {
            name: (worker.role, host_and_port(worker.host, worker.control_port)) for name, worker in listed.items()
        }
        self._roster: Roster[Peer] = Roster(
            [StaticList(addresses), *configured_sources(config.discovery, (role,) if role else ())],
            self,
            model=config.model.name,
            max_workers=config.discovery.max_workers,
            forget_after_s=config.discovery.forget_after_s,
        )

    def __getitem__(self, name: str) -> Peer:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    async def run(self) -> None:
        """Follow them until cancelled."""
        await self._roster.run()

    async def change(self) -> None:
        """Wait until a peer joins or leaves."""
        await self._changed.wait()

    # ---- what the roster tells --------------------------------------------------------------------------------------

    def start(self, contact: Contact) -> Peer:
        peer = Peer(contact, self._on_change, self._transport)
        self._followed.add(peer)
        return peer

    def joined(self, name: str, peer: Peer) -> None:
        self._members[name] = peer
        self._wake()

    def left(self, name: str, peer: Peer) -> None:
        del self._members[name]
        self._on_leave(name)
        self._wake()

    def ended(self, peer: Peer) -> None:
        self._followed.discard(peer)
        self.changed()

    def changed(self) -> None:
        hosts = frozenset(host for peer in self._followed if (host := peer.found_host))
        if hosts == self._hosts:
            return
        try:
            self._on_hosts(hosts)
        except OSError as error:  # the agent lacks descriptors to write them down: its engine serves on meanwhile
            if not is_exhaustion(error):
                raise
            log.warning("peers not written down; trying again", extra={"fields": {"reason": str(error)}})
            asyncio.get_running_loop().call_later(_AGAIN_S, self.changed)
        else:
            self._hosts = hosts

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
