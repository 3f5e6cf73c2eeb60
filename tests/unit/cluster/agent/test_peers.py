"""What an agent keeps and writes down of its peers."""

import asyncio
import errno

import pytest
from support.clusters.configs import config_of

from cluster.agent import peers as module
from cluster.agent.peers import Peers
from cluster.control.transport import PLAIN


class Found:
    found_host = "10.0.0.7"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_an_agent_without_descriptors_keeps_its_engine(tmp_path, monkeypatch, number: int):
    """An error would end the task that follows the peers, and with it the agent and its engine."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    config = config_of({"prefill-0": "prefill", "decode-0": "decode"}, tmp_path)

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
    await asyncio.wait_for(written.wait(), 120)
    peers.changed()
    assert told == [frozenset({"10.0.0.7"})] * 3
