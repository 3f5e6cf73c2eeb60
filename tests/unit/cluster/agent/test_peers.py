"""What an agent keeps and writes down of its peers."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.agent import peers as module
from cluster.agent.peers import Peer, Peers
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.transport import PLAIN
from cluster.discovery.source import Endpoint


class Found:
    found_host = "10.0.0.7"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_an_agent_without_descriptors_keeps_its_engine(tmp_path, monkeypatch, number: int):
    """An error would end the task that follows the peers, and with it the agent and its engine."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    workers = {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}}
    config = ClusterConfig.model_validate({"model": {"path": tmp_path, "name": "demo"}, "workers": workers})

    told: list[frozenset[str]] = []
    written = asyncio.Event()

    def write(hosts: frozenset[str]) -> None:
        told.append(hosts)
        if len(told) < 3:
            raise OSError(number, "no descriptors")
        written.set()

    peers = Peers(config, None, PLAIN, on_change=lambda: None, on_leave=lambda _: None, on_hosts=write)
    peers._followed.add(Found())  # type: ignore[arg-type]
    peers.changed()
    await asyncio.wait_for(written.wait(), 30)
    peers.changed()
    assert told == [frozenset({"10.0.0.7"})] * 3


class _Stream:
    def __init__(self, states: list[Any]) -> None:
        self._states = [*states, grpc.aio.EOF]

    async def read(self) -> Any:
        return self._states.pop(0)

    def cancel(self) -> None: ...


async def test_a_peer_with_many_adapters_takes_no_memory() -> None:
    """Each change of a peer's adapters copied all of them, of which a worker may have 100,000."""
    many = pb.ResidencyDelta(snapshot=True, resident=[f"sha256:{number:064x}" for number in range(5000)])
    states = [pb.WorkerState(incarnation="i1", residency=many), pb.WorkerState(incarnation="i2")]
    seen: list[int] = []
    contact = SimpleNamespace(name="p0", endpoint=Endpoint("127.0.0.1:1", "prefill", "p0"))
    peer = Peer(contact, lambda: seen.append(peer.state.ByteSize() if peer.state else -1), PLAIN)  # type: ignore[arg-type]
    await peer._follow(SimpleNamespace(WatchState=lambda _: _Stream(states)))  # type: ignore[arg-type]
    assert peer.state is not None
    assert peer.state.incarnation == "i2"
    assert len(seen) == 2
    assert max(seen) < 100
