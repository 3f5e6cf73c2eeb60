"""The workers at the other end of a worker's KV transfers: those of cluster.yaml, and those that sources find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.transport import Transport
from cluster.control.worker_watch import WorkerWatch
from cluster.discovery.configured import configured_sources
from cluster.discovery.roster import Contact, Roster
from cluster.discovery.static_list import StaticList


class Peer(WorkerWatch):
    """One peer."""

    def __init__(self, contact: Contact, on_change: Callable[[WorkerWatch], None], transport: Transport) -> None:
        endpoint = contact.endpoint
        super().__init__(contact.name, endpoint.address, on_change, role=endpoint.role, transport=transport)
        self._contact = contact

    def described(self, description: pb.WorkerDescription) -> None:
        self.name = self._contact.endpoint.name or description.name
        self._contact.describe(description)

    def lost(self) -> None:
        self._contact.lost()

    async def until_unused(self) -> None:
        """Returns at once: a warm-up notices by itself that its peer has left."""


class Peers(Mapping[str, Peer]):
    """The peers by name. A worker that comes back at another address is another one."""

    def __init__(
        self,
        config: ClusterConfig,
        role: str | None,  # None: there are none
        transport: Transport,
        *,
        on_change: Callable[[WorkerWatch], None],
        on_leave: Callable[[str], None],  # told the name
    ) -> None:
        self._transport = transport
        self._on_change = on_change
        self._on_leave = on_leave
        self._members: dict[str, Peer] = {}
        self._changed = asyncio.Event()  # set and replaced whenever somebody comes or leaves
        listed = config.workers_of(role) if role else {}
        addresses = {name: (worker.role, f"{worker.host}:{worker.control_port}") for name, worker in listed.items()}
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
        return Peer(contact, self._on_change, self._transport)

    def joined(self, name: str, peer: Peer) -> None:
        self._members[name] = peer
        self._wake()

    def left(self, name: str, peer: Peer) -> None:
        del self._members[name]
        self._on_leave(name)
        self._wake()

    def ended(self, peer: Peer) -> None: ...

    def changed(self) -> None: ...

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
