"""The set of workers: those that a source names and whose description is accepted.

Workers are identified by name. If two workers at different addresses have the same name, the reachable one with the
lower address is the member and the other one waits, so that all routers choose the same one, whichever they saw first.
Workers of cluster.yaml are members from the start, and no other worker can take their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from cluster.control import control_pb2 as pb
from cluster.control.transport import PLAIN, Transport
from cluster.discovery.descriptions import check_description, check_model
from cluster.discovery.source import Endpoint, WorkerSource, keep_following
from cluster.errors import DescriptionRefused

log = logging.getLogger(__name__)

_RETRY_S = 5.0  # after a follower that broke


class Follower(Protocol):
    """Follows the worker at one endpoint."""

    async def run(self) -> None:
        """Follow the worker until cancelled. Reports its description, and losses of contact, to the Contact."""

    async def until_unused(self) -> None:
        """Wait until a worker that has left is no longer used."""


F = TypeVar("F", bound=Follower)


class Owner(Protocol[F]):
    """The owner of a roster, with the roster's callbacks. They are synchronous, so that no two interleave."""

    def start(self, contact: Contact) -> F:
        """Create the follower of a new contact; the roster runs it."""

    def joined(self, name: str, follower: F) -> None:
        """The contact is now the member `name`."""

    def left(self, name: str, follower: F) -> None:
        """The contact is no longer a member, but its requests in flight may finish."""

    def ended(self, follower: F) -> None:
        """The follower has stopped."""

    def changed(self) -> None:
        """Membership is the same, but `is_settled` may have changed."""


class Contact:
    """One endpoint, and the worker that was found there."""

    def __init__(self, roster: Roster, endpoint: Endpoint, number: int) -> None:
        self.endpoint = endpoint
        self.number = number  # a worker that comes back at another endpoint has another one
        self.name = endpoint.name  # of the worker; empty: nobody acceptable is known here
        self.agent_id = ""
        self.is_live = False
        self.refusal = ""  # why who is here is not accepted
        self.left = asyncio.Event()  # the sources no longer name the endpoint
        self._roster = roster

    def describe(self, description: pb.WorkerDescription) -> None:
        """The worker has answered. Raises DescriptionRefused if it must not be used."""
        self._roster._described(self, description)

    def lost(self) -> None:
        """The worker no longer answers. Idempotent."""
        self._roster._lost(self)

    @property
    def is_listed(self) -> bool:
        """True for a worker of cluster.yaml."""
        return bool(self.endpoint.name)

    @property
    def rank(self) -> tuple[bool, bool, str]:
        """Of several contacts with one name, the lowest rank is the member."""
        return not self.is_listed, not self.is_live, self.endpoint.address


class Roster(Generic[F]):
    """Keeps a follower for each endpoint of the sources."""

    def __init__(
        self,
        sources: Sequence[WorkerSource],
        owner: Owner[F],
        *,
        model: str,
        max_workers: int,
        forget_after_s: float,
        transport: Transport = PLAIN,
    ) -> None:
        self._sources = sources
        self._owner = owner
        self._model = model
        self._transport = transport
        self._max_workers = max_workers
        self._forget_after_s = forget_after_s
        self._contacts: dict[Endpoint, Contact] = {}
        self._followers: dict[int, F] = {}  # by contact; also of endpoints that have left, until they are unused
        self._by_name: dict[str, set[Contact]] = {}
        self._members: dict[str, Contact] = {}
        self._forgetting: dict[int, asyncio.TimerHandle] = {}  # by contact
        self._warned: dict[str, frozenset[str]] = {}  # by name: the addresses that the log has named last
        self._num_ignored = 0
        self._num_numbers = 0
        self._group: asyncio.TaskGroup | None = None  # while `run` runs
        self._update()

    async def run(self) -> None:
        """Follow the sources and their workers until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for contact in tuple(self._contacts.values()):
                    self._begin(contact)
                for source in self._sources:
                    group.create_task(keep_following(source, self._update), name=f"source {source.label}")
                await asyncio.Event().wait()
        finally:
            self._group = None
            for timer in self._forgetting.values():
                timer.cancel()

    @property
    def is_settled(self) -> bool:
        """False while there may be workers that have not described themselves yet."""
        is_known = all(contact.name or contact.refusal for contact in self._contacts.values())
        return is_known and all(source.has_answered for source in self._sources)

    @property
    def open_roles(self) -> frozenset[str]:
        """The roles of workers that may come."""
        return frozenset().union(*(source.roles for source in self._sources))

    # ---- endpoints --------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Add and remove contacts, so that they are those that the sources name."""
        wanted = self._wanted()
        for endpoint in sorted(self._contacts.keys() - wanted):
            contact = self._contacts.pop(endpoint)
            self._release(contact)
            contact.left.set()
        for endpoint in sorted(wanted - self._contacts.keys()):
            self._num_numbers += 1
            contact = self._contacts[endpoint] = Contact(self, endpoint, self._num_numbers)
            self._followers[contact.number] = self._owner.start(contact)
            if contact.name:
                self._claim(contact)
            if self._group is not None:
                self._begin(contact)
        self._owner.changed()

    def _wanted(self) -> set[Endpoint]:
        """At most `max_workers` beside those of cluster.yaml, and each address once: the first source's."""
        wanted = {endpoint for source in self._sources for endpoint in source.endpoints if endpoint.name}
        taken = {endpoint.address for endpoint in wanted}
        found: list[Endpoint] = []
        for source in self._sources:
            new = sorted(each for each in source.endpoints if not each.name and each.address not in taken)
            taken |= {each.address for each in new}
            found += new
        found.sort(key=lambda endpoint: endpoint not in self._contacts)  # those that are followed stay
        if num_ignored := max(0, len(found) - self._max_workers):
            del found[self._max_workers :]
        if num_ignored > self._num_ignored:
            log.error(
                "more workers found than are followed; ignoring the rest",
                extra={"fields": {"max_workers": self._max_workers, "ignored": num_ignored}},
            )
        self._num_ignored = num_ignored
        return wanted | set(found)

    def _begin(self, contact: Contact) -> None:
        assert self._group is not None
        self._group.create_task(self._follow(contact), name=f"follow {contact.name or contact.endpoint.address}")

    async def _follow(self, contact: Contact) -> None:
        follower = self._followers[contact.number]
        following = asyncio.create_task(_keep_running(follower, contact), name=f"link to {contact.endpoint.address}")
        try:
            await contact.left.wait()
            await follower.until_unused()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            del self._followers[contact.number]
            self._owner.ended(follower)

    # ---- names ------------------------------------------------------------------------------------------------------

    def _described(self, contact: Contact, description: pb.WorkerDescription) -> None:
        if contact.left.is_set():
            return
        try:
            self._check(contact, description)
        except DescriptionRefused as refusal:
            if not contact.is_listed:
                self._release(contact)
            if contact.refusal != str(refusal):
                fields = {"address": contact.endpoint.address, "reason": str(refusal)}
                log.warning("worker refused", extra={"fields": fields})
            contact.refusal = str(refusal)
            self._owner.changed()
            raise
        if not contact.is_listed and contact.name != description.name:
            self._release(contact)
        was_known = bool(contact.name)
        contact.refusal = ""
        contact.is_live, contact.agent_id = True, description.agent_id
        contact.name = contact.endpoint.name or description.name
        if timer := self._forgetting.pop(contact.number, None):
            timer.cancel()
        self._claim(contact)
        if not was_known:
            self._owner.changed()

    def _check(self, contact: Contact, description: pb.WorkerDescription) -> None:
        """Raise DescriptionRefused. The name and address of a worker in cluster.yaml are those given there."""
        self._transport.check_role(description, contact.endpoint.role)
        if contact.is_listed:
            check_model(description, self._model)
            return
        check_description(description, self._model)
        listed = self._members.get(description.name)
        if listed is not None and listed.is_listed:
            raise DescriptionRefused(
                f"its name is {description.name!r}, which is that of the worker at {listed.endpoint.address} in "
                "cluster.yaml"
            )

    def _lost(self, contact: Contact) -> None:
        if not contact.is_live:
            return
        contact.is_live = False
        if contact.left.is_set() or contact.is_listed:
            return
        if contact.name:
            self._settle(contact.name)
            timer = asyncio.get_running_loop().call_later(self._forget_after_s, self._forget, contact)
            self._forgetting[contact.number] = timer

    def _forget(self, contact: Contact) -> None:
        fields = {"worker": contact.name, "address": contact.endpoint.address, "silent_s": self._forget_after_s}
        log.info("worker forgotten", extra={"fields": fields})
        self._release(contact)
        self._owner.changed()

    def _claim(self, contact: Contact) -> None:
        self._by_name.setdefault(contact.name, set()).add(contact)
        self._settle(contact.name)

    def _release(self, contact: Contact) -> None:
        """Remove the contact from the members."""
        if timer := self._forgetting.pop(contact.number, None):
            timer.cancel()
        name, contact.name = contact.name, ""
        if name:
            self._by_name[name].discard(contact)
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Choose the member among the contacts with this name."""
        rivals = self._by_name[name]
        before, after = self._members.get(name), min(rivals, key=lambda contact: contact.rank, default=None)
        if after is None:
            del self._by_name[name]
        if before is not after:
            if before is not None:
                del self._members[name]
                self._owner.left(name, self._followers[before.number])
                log.info("worker left", extra={"fields": {"worker": name, "address": before.endpoint.address}})
            if after is not None:
                self._members[name] = after
                self._owner.joined(name, self._followers[after.number])
                if not after.is_listed:
                    log.info("worker joined", extra={"fields": {"worker": name, "address": after.endpoint.address}})
        self._warn(name, after, rivals)

    def _warn(self, name: str, member: Contact | None, rivals: set[Contact]) -> None:
        """Log several live workers with the same name, once. One agent may have several addresses."""
        others = {
            each.endpoint.address
            for each in rivals
            if member is not None and each is not member and each.is_live
            if not each.agent_id or each.agent_id != member.agent_id
        }
        if others and self._warned.get(name) != others:
            assert member is not None
            log.error(
                "several workers have the same name; only one is used",
                extra={"fields": {"worker": name, "used": member.endpoint.address, "ignored": sorted(others)}},
            )
        if others:
            self._warned[name] = frozenset(others)
        else:
            self._warned.pop(name, None)


async def _keep_running(follower: Follower, contact: Contact) -> None:
    while True:
        try:
            await follower.run()
        except Exception:  # the edge of this worker's task; the others must go on
            log.exception("worker link failed", extra={"fields": {"address": contact.endpoint.address}})
        contact.lost()
        await asyncio.sleep(_RETRY_S)
