"""A worker's peers, the other ends of its KV transfers: those of cluster.yaml, and those that discovery finds."""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Callable, Iterator, Mapping

import grpc

from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.transport import ROLES, AgentChannel, Transport, next_state
from cluster.discovery.configured import configured_sources
from cluster.discovery.roster import Contact, Roster
from cluster.discovery.source import StaticList
from cluster.errors import DescriptionRefused
from process.addresses import host_and_port
from process.exhaustion import is_exhaustion

_AGAIN_S = 1.0
_HEARTBEAT_S = 2.0
_DESCRIBE_TIMEOUT_S = 6.0
_ASK_S = 4.0  # less than the margin for which callers of ChangeRole outwait its deadline
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_REFUSED_RETRY_S = 5.0

log = logging.getLogger(__name__)


class Peer:
    """Follows one peer. `state` is None while it is unreachable, `description` until it was reached once."""

    def __init__(
        self,
        contact: Contact,
        on_change: Callable[[], None],
        transport: Transport,
        on_role: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = contact.name
        self.address = contact.endpoint.address
        self.description: pb.WorkerDescription | None = None
        self.state: pb.WorkerState | None = None
        self._contact = contact
        self._on_change, self._on_role = on_change, on_role
        self._transport = transport
        self._channel = AgentChannel(transport, self.address, contact.endpoint.role, self.name)
        self._control: WorkerControlStub | None = None  # of `run`, which alone replaces it, and ends calls by that

    @property
    def role(self) -> str:
        """The one that it says it has; until it has said one, that of cluster.yaml."""
        said = None if self.description is None else ROLES.get(self.description.role)
        return said or self._contact.endpoint.role

    @property
    def engine_tls(self) -> Callable[[], tuple[ssl.SSLContext, str]] | None:
        """For HTTPS to its engine; by its name, which may be known once it was described."""
        return self._transport.engine_tls(self._contact.endpoint.role, self.name)

    @property
    def incarnation(self) -> str:
        """Of its engine; empty unless that is up and well."""
        state = self.state
        is_well = state is not None and state.engine_state == pb.ENGINE_STATE_UP and not state.hung
        return state.incarnation if state is not None and is_well else ""

    @property
    def found_host(self) -> str:
        """The peer's IP address if discovery found it and its description was accepted, else empty."""
        if self._contact.is_listed or not self._contact.name:
            return ""
        try:
            return str(ipaddress.ip_address(self._contact.endpoint.host))
        except ValueError:
            return ""

    async def run(self) -> None:
        """Follow the worker until cancelled, reconnecting whenever the stream ends or falls silent."""
        failures = 0
        try:
            while True:
                pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                try:
                    control = self._control = await self._channel.stub()
                    description = await control.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
                    self._channel.check_name(description.name)
                    self.name = self._contact.endpoint.name or description.name
                    self._contact.describe(description)
                    before, self.description = self.role, description
                    if self.role != before:
                        self._on_role()
                    failures = 0
                    await self._follow(control)
                except DescriptionRefused:
                    pause_s = _REFUSED_RETRY_S
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    log.debug("control stream lost", extra={"fields": {"worker": self.name, "error": repr(error)}})
                if self.state is not None:
                    self.state = None
                    self._on_change()
                self._contact.lost()
                await asyncio.sleep(pause_s)
                failures += 1
        finally:
            await self._channel.aclose()

    async def _follow(self, control: WorkerControlStub) -> None:
        """Apply states until the stream ends. Raises TimeoutError if the worker is silent."""
        call = control.WatchState(pb.WatchStateRequest(heartbeat_s=_HEARTBEAT_S))
        try:
            while True:
                state = await next_state(call, _HEARTBEAT_S)
                if state is grpc.aio.EOF:
                    return
                state.ClearField("residency")  # of no use to peers; a worker may hold 100,000 adapters
                self.state = state
                self._on_change()
        finally:
            call.cancel()

    async def stays(self, role: str) -> bool:
        """Whether it takes requests in this role and is not told to leave it, by its own answer now."""
        if (control := self._control) is None:
            return False
        try:
            async with asyncio.timeout(_ASK_S):
                call = control.WatchState(pb.WatchStateRequest())
                state = await call.read()
                call.cancel()
                if state is grpc.aio.EOF or not state.ready or state.draining or state.leaves_role:
                    return False
                # After its state, which may be that of a next agent in another role.
                description = await control.Describe(pb.DescribeRequest())
        except (grpc.aio.AioRpcError, TimeoutError):
            return False
        return ROLES.get(description.role) == role

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
        on_change: Callable[[], None],
        on_leave: Callable[[str], None],  # told the name
        on_hosts: Callable[[frozenset[str]], None],  # told the IP addresses of all that were found and accepted
    ) -> None:
        self._transport = transport
        self._on_change = on_change
        self._on_leave = on_leave
        self._on_hosts = on_hosts
        self._hosts: frozenset[str] = frozenset()
        self._followed: set[Peer] = set()
        self._known: dict[str, Peer] = {}  # also workers that have another role now
        self._changed = asyncio.Event()  # set and replaced for `change`
        self._role = role
        listed = {name: worker for name, worker in config.workers.items() if role and config.may_be(worker.role, role)}
        found = [each for each in config.discovery.by_role if role and config.may_be(each, role)]
        addresses = {
            name: (worker.role, host_and_port(worker.host, worker.control_port)) for name, worker in listed.items()
        }
        self._roster: Roster[Peer] = Roster(
            [StaticList(addresses), *configured_sources(config.discovery, found)],
            self,
            model=config.model.name,
            max_workers=config.discovery.max_workers,
            forget_after_s=config.discovery.forget_after_s,
            transport=transport,
        )

    def __getitem__(self, name: str) -> Peer:
        if self._known[name].role != self._role:
            raise KeyError(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, peer in self._known.items() if peer.role == self._role)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    async def any_stays(self, role: str) -> bool:
        """Whether a worker has this role and stays in it, as `Peer.stays` says."""
        return any(await asyncio.gather(*(peer.stays(role) for peer in self._known.values())))

    async def run(self) -> None:
        """Follow them until cancelled."""
        await self._roster.run()

    async def change(self) -> None:
        """Wait until a peer joins, leaves or has another role."""
        await self._changed.wait()

    # ---- what the roster tells --------------------------------------------------------------------------------------

    def start(self, contact: Contact) -> Peer:
        peer = Peer(contact, self._on_change, self._transport, self._wake)
        self._followed.add(peer)
        return peer

    def joined(self, name: str, peer: Peer) -> None:
        self._known[name] = peer
        self._wake()

    def left(self, name: str, peer: Peer) -> None:
        del self._known[name]
        self._on_leave(name)
        self._wake()

    def ended(self, peer: Peer) -> None:
        # No change of hosts: if it has left, `changed` was called then; if the agent ends, its engine may go on.
        self._followed.discard(peer)

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
