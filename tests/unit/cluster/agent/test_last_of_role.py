"""The last worker of a role that takes requests keeps it, whoever asks at once, unless it is said that it may go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.adapters.tiny_model import write_model_config
from support.clusters.configs import config_of
from support.clusters.paired_agents import Peer, ready
from support.clusters.served_agent import serving
from support.engines.engine_stand_in import Engine
from support.waiting import until

from cluster.agent import worker_agent
from cluster.agent.engine_spec import engine_spec
from cluster.agent.peers import Peers
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.transport import Transport
from cluster.local.ports import with_ports
from decode_worker.agent import DecodeAgent
from engine.hooks.hook import SWITCHING
from process.lifetime import meanwhile

WORKERS = {"d0": "decode", "d1": "decode", "p": "prefill"}
REFUSED = "d0 is the last decode worker that takes requests"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.setattr(worker_agent, "_LOAD_POLL_BUSY_S", 0.02)
    monkeypatch.setattr(worker_agent, "_IDLE_FOR_S", 0.1)
    return with_ports(config_of(WORKERS, write_model_config(tmp_path), role_changes="manual"))


@asynccontextmanager
async def agent_of(config: ClusterConfig, name: str) -> AsyncIterator[DecodeAgent]:
    """A decode worker's agent, which follows the others. Its engine is up and idle."""
    agent = DecodeAgent(config, name, config.model.path / name)
    agent.successor = lambda _role: agent
    async with ready(agent, Engine()):
        yield agent


async def ask(agent: DecodeAgent, **fields: Any) -> str:
    """Have it become a prefill worker. Returns why it refuses; empty if it goes."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{agent.worker.control_port}") as channel:
        request = pb.ChangeRoleRequest(**{"role": pb.ROLE_PREFILL, "deadline_s": 60, **fields})
        try:
            await WorkerControlStub(channel).ChangeRole(request, timeout=120)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return ""


async def draining_states(agent: DecodeAgent, seen: list[bool]) -> None:
    async for state in agent.hub.watch(30):
        seen.append(state.draining)


@pytest.mark.parametrize(
    ("state", "role", "may_leave"),
    [
        ({"ready": True}, pb.ROLE_DECODE, True),
        ({"ready": False}, pb.ROLE_DECODE, False),
        ({"ready": True, "draining": True}, pb.ROLE_DECODE, False),
        ({"ready": True, "leaves_role": True}, pb.ROLE_DECODE, False),
        ({"ready": True}, pb.ROLE_PREFILL, False),
        (None, pb.ROLE_DECODE, False),
    ],
)
async def test_it_leaves_only_if_another_one_stays(
    config: ClusterConfig, state: dict[str, bool] | None, role: pb.Role, may_leave: bool
) -> None:
    other, prefill = Peer("d1"), Peer("p")
    other.description.role = role
    prefill.hub.update(ready=True)
    async with AsyncExitStack() as stack:
        for peer in (other, prefill):
            if peer is prefill or state is not None:
                port = config.workers[peer.description.name].control_port
                await stack.enter_async_context(serving(peer, f"127.0.0.1:{port}"))
        agent = await stack.enter_async_context(agent_of(config, "d0"))
        seen: list[bool] = []
        await stack.enter_async_context(meanwhile(draining_states(agent, seen)))
        await agent_knows(agent, "p")
        if state is not None:
            await agent_knows(agent, "d1")
            other.hub.update(**state)
        answer = await ask(agent)
        if may_leave:
            assert (answer, agent._next_role.get_nowait()) == ("", "prefill")
        else:
            assert answer.startswith(f"FAILED_PRECONDITION: {REFUSED}")
            assert "--even-last" in answer
            assert not any(seen), "it has stopped taking requests meanwhile"
            assert not agent.hub.state.leaves_role
            assert await ask(agent, even_last=True) == ""
            assert agent.hub.state.draining


async def test_whom_it_asks_it_goes_on_following_with_newer_certificates(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Peer("d1")
    port = config.workers["d1"].control_port
    async with serving(other, f"127.0.0.1:{port}"), agent_of(config, "d0") as agent:
        await agent_knows(agent, "d1")
        monkeypatch.setattr(Transport, "version", 1)
        assert (await ask(agent)).startswith(f"FAILED_PRECONDITION: {REFUSED}")
        other.hub.update(ready=True)
        await until(lambda: (state := agent.peers._known["d1"].state) is not None and state.ready)
        assert await ask(agent) == ""


async def agent_knows(agent: DecodeAgent, name: str) -> None:
    known = agent.peers._known
    await until(lambda: name in known and known[name].description is not None, 60)


async def test_two_at_once_never_both_leave(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has been told to leave before either asks the other: the worst order."""
    any_stays, both = Peers.any_stays, asyncio.Barrier(2)

    async def after_both(peers: Peers, role: str) -> bool:
        await both.wait()
        return await any_stays(peers, role)

    async with agent_of(config, "d0") as one, agent_of(config, "d1") as other:
        await agent_knows(one, "d1")
        await agent_knows(other, "d0")
        monkeypatch.setattr(Peers, "any_stays", after_both)
        answers = await asyncio.gather(ask(one), ask(other))
        assert any("is the last decode worker" in answer for answer in answers)
        monkeypatch.setattr(Peers, "any_stays", any_stays)
        if "" not in answers:  # both have seen the other: whoever is asked again may go
            assert await ask(one) == ""
        leaver, stayer = (one, other) if one.hub.state.leaves_role else (other, one)
        assert leaver._next_role.get_nowait() == "prefill"
        assert "is the last decode worker" in await ask(stayer)
        assert not stayer.hub.state.draining


def test_engines_of_a_dry_run_have_one_role(config: ClusterConfig, tmp_path: Path) -> None:
    dry = config.model_copy(update={"role_changes": "dry-run"})
    assert [engine_spec(each, "d0", tmp_path).role for each in (config, dry)] == [SWITCHING, "decode"]


async def test_a_role_that_no_worker_can_have_is_named(config: ClusterConfig) -> None:
    async with agent_of(config, "d0") as agent:
        assert await ask(agent, role=99) == (
            "INVALID_ARGUMENT: role must be one of ROLE_UNSPECIFIED, ROLE_PREFILL, ROLE_DECODE, ROLE_UNIFIED (found 99)"
        )
        for role, name in ((pb.ROLE_UNIFIED, "unified"), (pb.ROLE_UNSPECIFIED, "unspecified")):
            expected = f"FAILED_PRECONDITION: d0 cannot become {name}: roles change between prefill and decode"
            assert await ask(agent, role=role) == expected
        assert not agent.hub.state.leaves_role
