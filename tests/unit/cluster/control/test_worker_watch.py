"""What an agent keeps of its peers: their state, and nothing of the adapters that they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc

from cluster.control import control_pb2 as pb
from cluster.control.worker_watch import WorkerWatch


class _Stream:
    def __init__(self, states: list[Any]) -> None:
        self._states = [*states, grpc.aio.EOF]

    async def read(self) -> Any:
        return self._states.pop(0)

    def cancel(self) -> None: ...


async def test_a_peer_with_many_adapters_takes_no_memory() -> None:
    """Each change of a peer's adapters copied all of them, of which a worker may have 100,000."""
    seen: list[int] = []

    many = pb.ResidencyDelta(snapshot=True, resident=[f"sha256:{number:064x}" for number in range(5000)])
    states = [pb.WorkerState(incarnation="i1", residency=many), pb.WorkerState(incarnation="i2")]
    watch = WorkerWatch("p0", "127.0.0.1:1", lambda each: seen.append(each.state.ByteSize() if each.state else -1))
    watch.control = SimpleNamespace(WatchState=lambda _: _Stream(states))  # type: ignore[assignment]
    await watch._follow()
    assert watch.state is not None
    assert watch.state.incarnation == "i2"
    assert not hasattr(watch, "resident")
    assert len(seen) == 2
    assert max(seen) < 100
