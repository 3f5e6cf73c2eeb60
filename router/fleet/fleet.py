"""The router's view of all workers, kept current by one control stream per worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from cluster.control.transport import PLAIN, Transport
from router.errors import WorkerLost, WorkerStalled
from router.fleet.breaker import Breaker
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.progress import ProgressCheck
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_loads import WorkerLoads
from router.fleet.worker_residency import WorkerResidency

T = TypeVar("T")
Loss = Callable[[WorkerLost], None]


class Watch:
    """Reports the loss of one engine to its user, once. Lasts until `end`."""

    def __init__(self, watches: set[Watch], view: WorkerView, on_loss: Loss) -> None:
        self.needs_contact = True  # losing contact with the agent counts as a loss, too
        self.needs_progress = True  # and so does an engine that hangs
        self._watches = watches
        self._incarnation = view.incarnation
        self._on_loss = on_loss
        watches.add(self)

    def end(self) -> None:
        self._watches.discard(self)

    def check(self, view: WorkerView) -> None:
        """Report a loss if the engine is down or has another incarnation.

        A running stream does not need the agent, and waits until a hanging engine is back or is restarted: set
        `needs_contact` and `needs_progress` to False for it.
        """
        if view.is_connected:
            is_lost = not (view.is_engine_up and view.incarnation == self._incarnation)
            what = "the engine of worker {} went away"
            if not is_lost and view.is_hung:
                is_lost, what = self.needs_progress, "the engine of worker {} hangs"
        else:
            is_lost, what = self.needs_contact, "the router lost contact with worker {}"
        if is_lost:
            self.end()
            self._on_loss(WorkerLost(what.format(view.name), worker=view.name))


class Fleet:
    """All workers of cluster.yaml."""

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, str]],  # name -> (role, host:port of the agent)
        loads: WorkerLoads,
        *,
        heartbeat_s: float,
        connect_timeout_s: float,
        transport: Transport = PLAIN,
    ) -> None:
        self.loads = loads
        self._changed = asyncio.Event()  # set and replaced whenever a view changes
        self._views = {name: WorkerView(name, role) for name, (role, _) in addresses.items()}
        self._state: FleetState | None = None  # None: outdated
        self._watches: dict[str, set[Watch]] = {name: set() for name in addresses}
        self._breakers: dict[str, Breaker] = {}
        self._links = {
            name: WorkerLink(
                self._views[name],
                address,
                heartbeat_s=heartbeat_s,
                connect_timeout_s=connect_timeout_s,
                on_view=self._update,
                on_load=loads.report,
                transport=transport,
            )
            for name, (_, address) in addresses.items()
        }

    @asynccontextmanager
    async def following(self):
        """Keep every control stream open inside the block."""
        async with AsyncExitStack() as stack:
            tasks = [asyncio.create_task(link.run(), name=f"follow {name}") for name, link in self._links.items()]
            for task in tasks:
                stack.push_async_callback(_stop, task)
            yield self

    @property
    def state(self) -> FleetState:
        """A snapshot. The same object until a worker changes."""
        if self._state is None:
            self._state = FleetState(MappingProxyType(dict(self._views)), self.loads)
        return self._state

    def watch(self, view: WorkerView, on_loss: Loss) -> Watch:
        """Call `on_loss` once when the engine of `view` is lost, at once if it already is."""
        watch = Watch(self._watches[view.name], view, on_loss)
        watch.check(self._views[view.name])
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
        self, workers: tuple[str, ...], timeout_s: float, on_stall: Callable[[WorkerStalled], None]
    ) -> ProgressCheck:
        """Call `on_stall` when none of the workers has reported progress for so long, until the check's `end`."""

        def has_contact(worker: str) -> bool:
            return worker in self._views and self._views[worker].is_connected

        return ProgressCheck(self.loads, has_contact, workers, timeout_s, on_stall)

    def breaker(self, worker: str) -> Breaker:
        """What this router's calls to the worker's engine have shown."""
        breaker = self._breakers.get(worker)
        if breaker is None:
            breaker = self._breakers[worker] = Breaker(worker, partial(self._breaker_changed, worker))
        return breaker

    def link(self, worker: str) -> WorkerLink:
        """The link to one worker, for calls to its agent. Raises KeyError for a name that is not in cluster.yaml."""
        return self._links[worker]

    def workers_with(self, revision_id: str) -> tuple[str, ...]:
        """The connected workers that have a revision in host memory, by name."""
        return self._connected(lambda residency: revision_id in residency.host)

    def workers_with_on_disk(self, revision_id: str) -> tuple[str, ...]:
        """The connected workers that have a revision on their disk, by name."""
        return self._connected(lambda residency: revision_id in residency.disk)

    def workers_with_in_memory_only(self) -> dict[str, list[str]]:
        """By revision id, the connected workers that have a revision that is in no store."""
        found: dict[str, list[str]] = {}
        for name, view in sorted(self._views.items()):
            for revision_id in view.residency.memory_only if view.is_connected else ():
                found.setdefault(revision_id, []).append(name)
        return found

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds; False after `timeout_s`. Evaluated at every change but of a worker's load."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    async def wait_until_resident(self, revision_id: str, workers: Collection[str], timeout_s: float) -> bool:
        """Wait until these workers have reported the revision as resident. False after `timeout_s`."""
        return await self.wait_until(lambda: set(workers) <= set(self.workers_with(revision_id)), timeout_s)

    def _connected(self, has_revision: Callable[[WorkerResidency], bool]) -> tuple[str, ...]:
        """Names of the connected workers whose residency fulfils the condition."""
        names = (name for name, view in self._views.items() if view.is_connected and has_revision(view.residency))
        return tuple(sorted(names))

    def _breaker_changed(self, worker: str) -> None:
        if worker in self._views:
            self._update(self._views[worker])

    def _update(self, view: WorkerView) -> None:
        before, breaker = self._views[view.name], self.breaker(view.name)
        if view.incarnation != before.incarnation:
            breaker.reset()
        if view.is_blocked != breaker.is_blocking:
            view = replace(view, is_blocked=breaker.is_blocking)
        self._views[view.name] = view
        has_changed = view != before or view.residency is not before.residency
        if has_changed:
            self._state = None
        # Not at every heartbeat, since each waiter looks at the whole fleet.
        if has_changed or view.num_residency_changes != before.num_residency_changes:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
        for watch in tuple(self._watches[view.name]):
            watch.check(view)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
