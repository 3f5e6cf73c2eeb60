"""The router's view of all workers, kept current by one control stream per worker. Workers come and go."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from cluster.config.discovery import DiscoveryConfig
from cluster.control import control_pb2 as control
from cluster.control.transport import PLAIN, Transport
from cluster.discovery.roster import Contact, Roster
from cluster.discovery.source import WorkerSource
from router.errors import WorkerLost, WorkerStalled
from router.fleet.fleet_state import FleetState, Holders, WorkerView
from router.fleet.lost_workers import Breaker, Loss, Observed, ProgressCheck, Watch
from router.fleet.queues import Queues
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_loads import Spent, WorkerLoad, WorkerLoads

T = TypeVar("T")
_MAX_NAMED = 100  # workers of a revision and tier


class Fleet:
    """All known workers: those listed in cluster.yaml, and those that discovery finds while the router runs."""

    def __init__(
        self,
        sources: Sequence[WorkerSource],
        loads: WorkerLoads,
        *,
        model: str,
        heartbeat_s: float,
        connect_timeout_s: float,
        discovery: DiscoveryConfig,
        on_leave: Callable[[str], None],  # told the name of every worker that leaves
        transport: Transport = PLAIN,
    ) -> None:
        self.loads = loads
        self._heartbeat_s = heartbeat_s
        self._connect_timeout_s = connect_timeout_s
        self._on_leave = on_leave
        self._transport = transport
        self._changed = asyncio.Event()  # set and replaced whenever a view changes
        self._views: dict[str, WorkerView] = {}
        self._state: FleetState | None = None  # None: outdated
        self._holders = Holders()
        self._links: dict[int, WorkerLink] = {}  # by contact; also of workers that have left, until nothing is there
        self._watches: dict[int, set[Watch]] = {}
        self._leaving: dict[int, WorkerLoad] = {}  # by contact: what is in flight at workers that have left
        self._breakers: dict[str, Breaker] = {}
        self._roster: Roster[WorkerLink] = Roster(
            sources,
            self,
            model=model,
            max_workers=discovery.max_workers,
            forget_after_s=discovery.forget_after_s,
            transport=transport,
        )

    @asynccontextmanager
    async def following(self):
        """Keep a control stream open to every worker inside the block, including workers that join later."""
        following = asyncio.create_task(self._roster.run(), name="follow workers")
        try:
            yield self
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    @property
    def state(self) -> FleetState:
        """A snapshot. The same object until a worker changes."""
        if self._state is None:
            self._state = FleetState(
                MappingProxyType(dict(self._views)),
                self.loads,
                self._holders,
                open_roles=self._roster.open_roles,
                is_settled=self._roster.is_settled,
            )
        return self._state

    def watch(self, view: WorkerView, on_loss: Loss) -> Watch:
        """Call `on_loss` once when the engine of `view` is lost, at once if it already is.

        A worker that has left the fleet is not lost: its engine may still finish what it has begun.
        """
        link = self._links.get(view.contact)
        watch = Watch(self._watches.get(view.contact, set()), view, on_loss)
        watch.check(link.view if link is not None else replace(view, is_connected=False))
        return watch

    async def unless_lost(self, view: WorkerView, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the engine of `view` is lost or hangs. Raises WorkerLost."""
        losses: list[WorkerLost] = []
        try:
            async with asyncio.timeout(None) as limit:

                def lose(error: WorkerLost) -> None:
                    losses.append(error)
                    limit.reschedule(asyncio.get_running_loop().time())

                watch = self.watch(view, lose)
                try:
                    return await work
                finally:
                    watch.end()
        except TimeoutError:
            if losses:
                raise losses[0] from None
            raise

    def check_progress(
        self, workers: Sequence[WorkerView], timeout_s: float, on_stall: Callable[[WorkerStalled], None]
    ) -> ProgressCheck:
        """Call `on_stall` once none of the workers has reported progress for `timeout_s`, unless ended before."""
        return ProgressCheck(lambda: tuple(map(self._observed, workers)), self.loads.clock, timeout_s, on_stall)

    def breaker(self, worker: str) -> Breaker:
        """The circuit breaker of a worker. A worker that has left gets a new one, which is not kept."""
        breaker = self._breakers.get(worker)
        if breaker is None:
            breaker = Breaker(worker, partial(self._breaker_changed, worker))
            if worker in self._views:
                self._breakers[worker] = breaker
        return breaker

    def link(self, worker: str) -> WorkerLink:
        """The link to one worker, for calls to its agent. Raises WorkerLost for a name that is not known."""
        view = self._views.get(worker)
        if view is None:
            raise WorkerLost(f"there is no worker {worker}, or it has left", worker=worker)
        return self._links[view.contact]

    def link_of(self, view: WorkerView) -> WorkerLink:
        """As `link`, but also for a worker that has left with requests in flight. Raises WorkerLost for any other."""
        link = self._links.get(view.contact)
        if link is None:
            raise WorkerLost(f"worker {view.name} has left", worker=view.name)
        return link

    def workers_with(self, revision_id: str) -> tuple[str, ...]:
        """The connected workers that have a revision in host memory, by name."""
        views = self._views.items()
        return tuple(sorted(name for name, view in views if view.is_connected and revision_id in view.residency.host))

    def holders_of(self, revision_ids: Sequence[str]) -> list[dict[str, Any]]:
        """For each revision and each tier (host, disk, memory_only), the connected workers that have it.

        The list under a tier's name has at most 100 workers; `num_…` is their total number.
        """
        wanted = frozenset(revision_ids)
        found: dict[str, dict[str, list[str]]] = {
            revision_id: {"host": [], "disk": [], "memory_only": []} for revision_id in wanted
        }
        for name, view in sorted(self._views.items()):
            held = view.residency
            tiers = (("host", held.host), ("disk", held.disk), ("memory_only", held.memory_only))
            for tier, ids in tiers if view.is_connected else ():
                for revision_id in wanted & ids:  # by the smaller one: a worker may hold 100,000
                    found[revision_id][tier].append(name)
        return [
            {tier: names[:_MAX_NAMED] for tier, names in found[revision_id].items()}
            | {f"num_{tier}": len(names) for tier, names in found[revision_id].items()}
            for revision_id in revision_ids
        ]

    def workers_with_in_memory_only(self, only: Set[str] | None = None) -> dict[str, dict[str, bool]]:
        """By id of a revision that is in no store, the connected workers that have it, and whether each must keep it.

        `only`: of these revisions; None: of all.
        """
        found: dict[str, dict[str, bool]] = {}
        for name, view in sorted(self._views.items()):
            held = view.residency
            for revision_id in held.memory_only if only is None else held.memory_only & only:
                if view.is_connected:
                    found.setdefault(revision_id, {})[name] = revision_id in held.kept
        return found

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds; False after `timeout_s`. Evaluated at every change except of loads."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    def _observed(self, view: WorkerView) -> Observed:
        link = self._links.get(view.contact)
        load = self.loads[view.name] if self._is_member(view) else self._leaving.get(view.contact, WorkerLoad())
        return Observed(view.name, load, link is not None and link.view.is_connected)

    def _is_member(self, view: WorkerView) -> bool:
        """False if the worker has left, or if another worker has its name now."""
        member = self._views.get(view.name)
        return member is not None and member.contact == view.contact

    def _breaker_changed(self, worker: str) -> None:
        if worker in self._views:
            self._update(self._views[worker])

    def _update(self, view: WorkerView, state: control.WorkerState | None = None) -> None:
        """Take a report of a link, or a change of a breaker."""
        is_member = self._is_member(view)
        if state is not None:
            loads = [self.loads[view.name]] if is_member else []
            loads += [self._leaving[view.contact]] if view.contact in self._leaving else []
            queues = Queues.of(state.load)
            for load in loads:
                load.report(
                    self.loads.clock(),
                    used_kv_tokens=state.load.used_kv_tokens,
                    max_kv_tokens=state.load.max_kv_tokens,
                    progress=state.progress,
                    queues=queues,
                    num_routers=state.routers,
                    num_unread=queues.num_unread(view.role),
                    read_tokens=state.load.read_tokens,
                    spent=Spent(state.load.reading_us, state.load.decode_steps, state.load.decode_us),
                )
        if is_member:
            if view.role != self._views[view.name].role:  # as another worker: nothing is carried over
                link = self._links[view.contact]
                self.left(view.name, link)
                self.joined(view.name, link)
            before = self._views[view.name]
            breaker = self.breaker(view.name)
            if view.incarnation != before.incarnation:
                breaker.reset()
            if view.is_blocked != breaker.is_blocking:
                view = replace(view, is_blocked=breaker.is_blocking)
            self._views[view.name] = view
            has_changed = view != before or view.residency is not before.residency
            # Not at every heartbeat, since each waiter looks at the whole fleet.
            if has_changed:
                self.changed()
            elif view.num_residency_changes != before.num_residency_changes:
                self._wake_waiters()
        for watch in tuple(self._watches[view.contact]):
            watch.check(view)

    def _wake_waiters(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- what the roster tells --------------------------------------------------------------------------------------

    def start(self, contact: Contact) -> WorkerLink:
        """Create the link to a new endpoint."""
        self._watches[contact.number] = set()
        link = self._links[contact.number] = WorkerLink(
            contact,
            heartbeat_s=self._heartbeat_s,
            connect_timeout_s=self._connect_timeout_s,
            report=self._update,
            holders=self._holders,
            transport=self._transport,
        )
        return link

    def joined(self, name: str, link: WorkerLink) -> None:
        """Add a worker to the fleet."""
        self._views[name] = link.view
        self.changed()

    def left(self, name: str, link: WorkerLink) -> None:
        """Remove a worker from the fleet. Its link is kept until its requests in flight have ended."""
        self._views.pop(name).residency.leave()
        link.begin_use()
        self._leaving[link.contact.number] = self.loads.forget(name, on_idle=link.end_use)
        if (breaker := self._breakers.pop(name, None)) is not None:
            breaker.reset()
        self._on_leave(name)
        self.changed()

    def ended(self, link: WorkerLink) -> None:
        """Drop a link that is no longer needed."""
        link.view.residency.leave()
        del self._links[link.contact.number]
        del self._watches[link.contact.number]
        self._leaving.pop(link.contact.number, None)

    def changed(self) -> None:
        """The fleet's membership may have settled: update the state."""
        self._state = None
        self._wake_waiters()
