"""The agent's state and its watchers."""

import asyncio
from collections.abc import Callable

from cluster.control import control_pb2 as pb
from cluster.control import worker_state
from cluster.control.worker_state import WorkerStateHub


async def collect(hub: WorkerStateHub, changes: Callable[[], None], count: int) -> list[pb.WorkerState]:
    """The first states that a watcher gets; the changes come after the first."""
    states: list[pb.WorkerState] = []
    async with asyncio.timeout(120):
        async for state in hub.watch(5.0):
            states.append(state)
            if len(states) == 1:
                changes()
            if len(states) == count:
                break
    return states


async def test_what_is_in_memory_only_outlives_the_engine():
    hub = WorkerStateHub()
    hub.add_in_memory_only("a")
    hub.add_kept("a")
    hub.add_resident("a")

    def changes() -> None:
        hub.add_resident("a")  # nothing new
        hub.add_in_memory_only("a")  # neither
        hub.add_kept("a")
        hub.clear_resident()
        hub.remove_kept("a")
        hub.remove_in_memory_only("b")
        hub.remove_in_memory_only("a")

    first, cleared, released, gone = await collect(hub, changes, 4)
    snapshot = first.residency
    assert (snapshot.snapshot, list(snapshot.in_memory_only), list(snapshot.kept)) == (True, ["a"], ["a"])
    assert list(released.residency.not_kept) == ["a"]
    assert (list(cleared.residency.evicted), list(cleared.residency.not_in_memory_only)) == (["a"], [])
    assert list(gone.residency.not_in_memory_only) == ["a"]
    assert hub.in_memory_only == set()


async def test_an_update_that_changes_nothing_is_not_published():
    hub = WorkerStateHub()

    def changes() -> None:
        hub.update(draining=False)
        hub.update(load=pb.Load())
        hub.update(load=pb.Load(running_requests=1))

    assert (await collect(hub, changes, 2))[1].load.running_requests == 1


async def test_a_watcher_that_falls_behind_is_cut_off(monkeypatch):
    monkeypatch.setattr(worker_state, "_MAX_QUEUED_STATES", 2)
    hub = WorkerStateHub()

    watch = hub.watch(5.0)
    await anext(watch)
    for number in range(10):
        hub.update(load=pb.Load(running_requests=number + 1))
    found = len([state async for state in watch])
    assert found == 2
