"""A worker's state inside its agent, published to any number of watchers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from cluster.control import control_pb2 as pb

_MAX_IDS = 10_000  # per message: gRPC's limit is 4 MiB, and an id has 71 bytes
# Sets of revisions, and what a delta calls those that are no longer in them.
_RESIDENCY = {
    "resident": "evicted", "on_disk": "off_disk", "in_memory_only": "not_in_memory_only", "kept": "not_kept"
}  # fmt: skip
_MAX_QUEUED_STATES = 256  # a slower watcher is disconnected and reconnects for a snapshot


class WorkerStateHub:
    """Owns the worker's state and residency, and publishes every change to each watcher."""

    def __init__(self) -> None:
        self.state = pb.WorkerState(
            engine_state=pb.ENGINE_STATE_STARTING, reason="the engine is starting", load=pb.Load()
        )
        self.resident: set[str] = set()
        self.on_disk: set[str] = set()
        # In host memory and, as the router that pushed them knew, in no store; whether the engine holds them or not.
        self.in_memory_only: set[str] = set()
        self.kept: set[str] = set()  # pinned by routers
        self._watchers: set[asyncio.Queue[pb.WorkerState]] = set()
        self._num_routers = 0  # of the watchers

    def update(self, **fields) -> None:
        """Set fields of the state; publishes it if any value changed."""
        changed = pb.WorkerState()
        changed.CopyFrom(self.state)
        for name, value in fields.items():
            if name in ("warm_pairs", "not_warm_with"):
                del getattr(changed, name)[:]
                getattr(changed, name).extend(value)
            elif name == "load":
                changed.load.CopyFrom(value)
            else:
                setattr(changed, name, value)
        if changed != self.state:
            self.state = changed
            self._publish(pb.ResidencyDelta())

    def add_resident(self, revision_id: str) -> None:
        """Publish that a revision is usable."""
        self._change(resident=[revision_id])

    def remove_resident(self, revision_id: str) -> None:
        """Publish that a revision is no longer usable."""
        self._change(evicted=[revision_id])

    def clear_resident(self) -> None:
        """Publish the loss of all residency with the engine. The disk cache is unaffected."""
        self._change(evicted=self.resident)

    def change_on_disk(self, added: Iterable[str], removed: Iterable[str]) -> None:
        """Publish changes of the worker's disk cache."""
        self._change(on_disk=added, off_disk=removed)

    def add_in_memory_only(self, revision_id: str) -> None:
        """Publish that host memory holds a revision that no store has."""
        self._change(in_memory_only=[revision_id])

    def remove_in_memory_only(self, revision_id: str) -> None:
        """Publish that host memory no longer holds it."""
        self._change(not_in_memory_only=[revision_id])

    def add_kept(self, revision_id: str) -> None:
        """Publish that a router's pin keeps a revision."""
        self._change(kept=[revision_id])

    def remove_kept(self, revision_id: str) -> None:
        """Publish that none does any more."""
        self._change(not_kept=[revision_id])

    def _change(self, **ids: Iterable[str]) -> None:
        """Publish what is new of these changes, by the fields of ResidencyDelta."""
        new: dict[str, list[str]] = {}
        for name, gone in _RESIDENCY.items():
            held: set[str] = getattr(self, name)
            added, removed = set(ids.get(name, ())) - held, set(ids.get(gone, ())) & held
            held |= added
            held -= removed
            new |= {name: sorted(added), gone: sorted(removed)}
        for delta in _deltas(**new):
            self._publish(delta)

    async def watch(self, heartbeat_s: float, *, by_router: bool = False) -> AsyncIterator[pb.WorkerState]:
        """Yield a snapshot, then every change, and the state again whenever `heartbeat_s` pass without one."""
        self._count_routers(by_router)  # before there is a queue, which must begin with the snapshot
        queue: asyncio.Queue[pb.WorkerState] = asyncio.Queue(_MAX_QUEUED_STATES)
        self._watchers.add(queue)
        try:
            # Taken as a whole before the first message is sent: later changes are in the queue.
            snapshot = list(_deltas(**{name: sorted(getattr(self, name)) for name in _RESIDENCY}))
            snapshot = snapshot or [pb.ResidencyDelta()]
            snapshot[0].snapshot = True
            for state in [self._with(delta) for delta in snapshot]:
                yield state
            while queue in self._watchers or not queue.empty():
                try:
                    yield await asyncio.wait_for(queue.get(), heartbeat_s)
                except TimeoutError:
                    yield self._with(pb.ResidencyDelta())
        finally:
            self._watchers.discard(queue)
            self._count_routers(-by_router)

    def end(self) -> None:
        """End all watches, each after the state as it is now."""
        self._publish(pb.ResidencyDelta())
        self._watchers.clear()

    def _count_routers(self, more: int) -> None:
        self._num_routers += more
        self.update(routers=self._num_routers)

    def _with(self, residency: pb.ResidencyDelta) -> pb.WorkerState:
        state = pb.WorkerState()
        state.CopyFrom(self.state)
        state.residency.CopyFrom(residency)
        return state

    def _publish(self, residency: pb.ResidencyDelta) -> None:
        state = self._with(residency)
        for queue in tuple(self._watchers):
            if queue.full():
                self._watchers.discard(queue)
            else:
                queue.put_nowait(state)


def _deltas(**revision_ids: Sequence[str]) -> Iterator[pb.ResidencyDelta]:
    """These revision ids, in as few messages as possible; no message for no ids."""
    delta, room = pb.ResidencyDelta(), _MAX_IDS
    for name, ids in revision_ids.items():
        begin = 0
        while begin < len(ids):
            if not room:
                yield delta
                delta, room = pb.ResidencyDelta(), _MAX_IDS
            taken = ids[begin : begin + room]
            getattr(delta, name).extend(taken)
            begin, room = begin + len(taken), room - len(taken)
    if room < _MAX_IDS:
        yield delta
