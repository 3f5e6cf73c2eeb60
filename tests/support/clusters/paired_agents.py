"""Real agents of pairs beside stand-ins of their engines and of their peers' agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from support.adapters.tiny_model import TINY
from support.clusters.configs import config_of
from support.clusters.served_agent import serving
from support.engines.engine_stand_in import Engine

from cluster.agent.worker_agent import WorkerAgent
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlServicer, WorkerControlStub
from cluster.control.http import serve_worker_http
from cluster.control.service import serve_control
from cluster.control.worker_state import WorkerStateHub
from cluster.local.ports import with_ports
from decode_worker.agent import DecodeAgent
from engine.client import EngineClient
from engine.supervisor import EngineSnapshot, EngineStatus
from process.lifetime import meanwhile


class NoEngine:
    """An agent's supervisor of an engine, which starts none."""

    progress = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()


def decode_agent(folder: Path, model: dict[str, Any] = TINY, **worker: Any) -> DecodeAgent:
    """The agent of decode worker `d`, beside a prefill worker `p`."""
    (folder / "config.json").write_text(json.dumps(model))
    config = config_of({"d": {"role": "decode", **worker}, "p": "prefill"}, folder, router={"drain_timeout_s": 60})
    return DecodeAgent(with_ports(config), "d", folder / "scratch")


class Peer(WorkerControlServicer):
    """The agent of a peer whose engine is up: of a prefill worker if its name begins with p, else a decode worker."""

    def __init__(self, name: str, engine_url: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.address = host, f"{host}:{port}"  # where it listens unless the agent's cluster.yaml lists it
        self.hub = WorkerStateHub()
        self.hub.update(engine_state=pb.ENGINE_STATE_UP, incarnation=f"{name}-1")
        role = pb.ROLE_PREFILL if name.startswith("p") else pb.ROLE_DECODE
        self.description = pb.WorkerDescription(name=name, role=role, model="demo", engine_url=engine_url)

    async def Describe(self, request, context) -> pb.WorkerDescription:
        return self.description

    async def WatchState(self, request, context):
        async for state in self.hub.watch(request.heartbeat_s):
            yield state


@asynccontextmanager
async def running(agent: WorkerAgent, engine: Engine, *peers: Peer) -> AsyncIterator[None]:
    """The agent's tasks and HTTP, without a supervisor, beside its peers' agents: where it expects them, if it does."""
    async with AsyncExitStack() as stack:
        for peer in peers:
            listed = agent.peers.get(peer.description.name)
            await stack.enter_async_context(serving(peer, listed.address if listed else peer.address))
        agent.engine = await stack.enter_async_context(aclosing(EngineClient(engine.url)))
        await stack.enter_async_context(serve_worker_http(agent))
        async with meanwhile(agent.run_role(), agent._follow_readiness(), agent.peers.run()):
            agent._engine_changed(EngineSnapshot(EngineStatus.UP, "one", (), 0, ""))
            yield


@asynccontextmanager
async def ready(agent: WorkerAgent, engine: Engine) -> AsyncIterator[WorkerControlStub]:
    """The control service of an agent whose engine is up and warm."""
    async with (
        engine.served(),
        serve_control(agent),
        grpc.aio.insecure_channel(f"127.0.0.1:{agent.worker.control_port}") as channel,
        aclosing(EngineClient(engine.url)) as agent.engine,
        meanwhile(agent._follow_readiness(), agent.peers.run()),
    ):
        engine_is(agent, EngineStatus.UP, "one")
        await state_where(agent, ready=True)
        yield WorkerControlStub(channel)


def engine_is(agent: WorkerAgent, status: EngineStatus, incarnation: str = "") -> None:
    agent._ready_incarnation = incarnation  # warm
    agent._engine_changed(EngineSnapshot(status, incarnation, (), 0, ""))


async def state_where(agent: WorkerAgent, **fields) -> pb.WorkerState:
    """The next published state with these values."""
    async with asyncio.timeout(120):
        async for state in agent.hub.watch(30):
            if all(getattr(state, name) == value for name, value in fields.items()):
                return state
    raise AssertionError("the hub ended")
