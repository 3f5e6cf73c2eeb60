"""A worker's state inside its agent: one owner, many watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from cluster.control import control_pb2 as pb

_MOST_IDS = 10_000  # of a message: gRPC takes at most 4 MiB, and an id has 71 bytes
_MAX_QUEUED_STATES = 256  # a watcher further behind is cut off and comes back for a snapshot


class WorkerStateHub:
    """Holds the current state and residency, and hands every change to each watcher."""

    def __init__(self) -> None:
        self.state = pb.WorkerState(
            engine_state=pb.ENGINE_STATE_STARTING, reason="the engine is starting", load=pb.Load()
        )
        self.resident: set[str] = set()
        self.on_disk: set[str] = set()
        self.in_memory_only: set[str] = set()  # in host memory, in the engine or not, and from no store
        self._watchers: set[asyncio.Queue[pb.WorkerState]] = set()

    def update(self, **fields) -> None:
        """Change fields of the state; watchers hear of it when something did change."""
        changed = pb.WorkerState()
        changed.CopyFrom(self.state)
        for name, value in fields.items():
            if name == "warm_pairs":
                del changed.warm_pairs[:]
                changed.warm_pairs.extend(value)
            elif name == "load":
                changed.load.CopyFrom(value)
            else:
                setattr(changed, name, value)
        if changed != self.state:
            self.state = changed
            self._publish(pb.ResidencyDelta())

    def add_resident(self, revision_id: str) -> None:
        """A revision became usable."""
        if revision_id not in self.resident:
            self.resident.add(revision_id)
            self._publish(pb.ResidencyDelta(resident=[revision_id]))

    def remove_resident(self, revision_id: str) -> None:
        """A revision is not usable any more."""
        if revision_id in self.resident:
            self.resident.remove(revision_id)
            self._publish(pb.ResidencyDelta(evicted=[revision_id]))

    def clear_resident(self) -> None:
        """The engine, and with it all residency, is gone. What is on disk stays."""
        evicted = sorted(self.resident)
        self.resident.clear()
        for delta in _deltas(evicted=evicted):
            self._publish(delta)

    def change_on_disk(self, come: Iterable[str], gone: Iterable[str]) -> None:
        """Revisions came to the worker's disk or left it."""
        come, gone = set(come) - self.on_disk, set(gone) & self.on_disk
        self.on_disk |= come
        self.on_disk -= gone
        for delta in _deltas(on_disk=sorted(come), off_disk=sorted(gone)):
            self._publish(delta)

    def add_in_memory_only(self, revision_id: str) -> None:
        """A revision that no store has came to host memory."""
        if revision_id not in self.in_memory_only:
            self.in_memory_only.add(revision_id)
            self._publish(pb.ResidencyDelta(in_memory_only=[revision_id]))

    def remove_in_memory_only(self, revision_id: str) -> None:
        """It left it, and is not here any more."""
        if revision_id in self.in_memory_only:
            self.in_memory_only.remove(revision_id)
            self._publish(pb.ResidencyDelta(not_in_memory_only=[revision_id]))

    async def watch(self, heartbeat_s: float) -> AsyncIterator[pb.WorkerState]:
        """The state with all residency now, then every change, and the state again after each silent `heartbeat_s`."""
        queue: asyncio.Queue[pb.WorkerState] = asyncio.Queue(_MAX_QUEUED_STATES)
        self._watchers.add(queue)
        try:
            # All of it as of now: what changes while it is being sent comes after it.
            here = {"resident": self.resident, "on_disk": self.on_disk, "in_memory_only": self.in_memory_only}
            snapshot = list(_deltas(**{name: sorted(ids) for name, ids in here.items()}))
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
    """What is said of these revisions, in as few messages as may be; none for none."""
    delta, room = pb.ResidencyDelta(), _MOST_IDS
    for name, ids in revision_ids.items():
        begin = 0
        while begin < len(ids):
            if not room:
                yield delta
                delta, room = pb.ResidencyDelta(), _MOST_IDS
            taken = ids[begin : begin + room]
            getattr(delta, name).extend(taken)
            begin, room = begin + len(taken), room - len(taken)
    if room < _MOST_IDS:
        yield delta
