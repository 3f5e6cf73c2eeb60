"""Real agents of pairs beside stand-ins of their engines and of their peers' agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from support.commands import SMALL_LLAMA
from support.routers.served_routes import served

from cluster.agent.worker_agent import WorkerAgent
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from cluster.control.http import serve_worker_http
from cluster.control.worker_state import WorkerStateHub
from cluster.local.ports import with_ports
from decode_worker.agent import DecodeAgent
from engine.client import EngineClient
from engine.supervisor import EngineSnapshot, EngineStatus


def decode_agent(folder: Path, model: dict[str, Any] = SMALL_LLAMA, **worker: Any) -> DecodeAgent:
    """The agent of decode worker `d`, beside a prefill worker `p`."""
    (folder / "config.json").write_text(json.dumps(model))
    workers = {"d": {"role": "decode", **worker}, "p": {"role": "prefill"}}
    data = {"model": {"path": folder, "name": "demo"}, "workers": workers, "router": {"drain_timeout_s": 60}}
    return DecodeAgent(with_ports(ClusterConfig.model_validate(data)), "d", folder / "scratch")


class Engine:
    """Answers completions, with `statuses` first, once it `may_answer`."""

    def __init__(self, *statuses: int, is_sick: bool = False) -> None:
        self.statuses = list(statuses)
        self.completions: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.may_answer = asyncio.Event()
        if not is_sick:
            self.may_answer.set()
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        self.completions.append(await request.json())
        await self.may_answer.wait()
        return web.json_response({}, status=self.statuses.pop(0) if self.statuses else 200)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Engine]:
        async with served(
            [web.post("/v1/completions", self.complete), web.post("/abort_request", self.abort)]
        ) as self.url:
            yield self


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
            server = grpc.aio.server()
            add_WorkerControlServicer_to_server(peer, server)
            listed = agent.peers.get(peer.description.name)
            server.add_insecure_port(listed.address if listed else peer.address)
            await server.start()
            stack.push_async_callback(server.stop, 0)
        agent.engine = EngineClient(engine.url)
        stack.push_async_callback(agent.engine.aclose)
        await stack.enter_async_context(serve_worker_http(agent))
        work = [agent.run_role(), agent._follow_readiness(), agent.peers.run()]
        tasks = [asyncio.create_task(each) for each in work]
        agent._engine_changed(EngineSnapshot(EngineStatus.UP, "one", (), 0, ""))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def state_where(agent: WorkerAgent, **fields) -> pb.WorkerState:
    """The next published state with these values."""
    async with asyncio.timeout(10):
        async for state in agent.hub.watch(30):
            if all(getattr(state, name) == value for name, value in fields.items()):
                return state
    raise AssertionError("the hub ended")
