"""A worker of pairs is ready with one warm pair: one sick peer keeps nobody out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

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
from prefill_worker.agent import PrefillAgent

MODEL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip


class Engine:
    """Answers completions once it `may_answer`."""

    def __init__(self, *, is_sick: bool = False) -> None:
        self.may_answer = asyncio.Event()
        if not is_sick:
            self.may_answer.set()
        self.url = ""

    async def complete(self, _request: web.Request) -> web.Response:
        await self.may_answer.wait()
        return web.json_response({})

    async def abort(self, _request: web.Request) -> web.Response:
        return web.Response()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Engine]:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.complete), web.post("/abort_request", self.abort)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        try:
            yield self
        finally:
            await runner.cleanup()


class Peer(WorkerControlServicer):
    """The agent of a peer whose engine is up."""

    def __init__(self, name: str, engine_url: str = "") -> None:
        self.hub = WorkerStateHub()
        self.hub.update(engine_state=pb.ENGINE_STATE_UP, incarnation=f"{name}-1")
        self.description = pb.WorkerDescription(name=name, engine_url=engine_url)

    async def Describe(self, request, context) -> pb.WorkerDescription:
        return self.description

    async def WatchState(self, request, context):
        async for state in self.hub.watch(request.heartbeat_s):
            yield state


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    data = {"model": {"path": tmp_path, "name": "demo"}, "workers": {name: {"role": roles[name]} for name in roles}}
    return with_ports(ClusterConfig.model_validate(data))


@asynccontextmanager
async def running(agent: WorkerAgent, engine: Engine, *peers: Peer) -> AsyncIterator[None]:
    """The agent's tasks and HTTP, without a supervisor, beside its peers' agents."""
    async with AsyncExitStack() as stack:
        for peer in peers:
            server = grpc.aio.server()
            add_WorkerControlServicer_to_server(peer, server)
            server.add_insecure_port(agent.peers[peer.description.name].address)
            await server.start()
            stack.push_async_callback(server.stop, 0)
        agent.engine = EngineClient(engine.url)
        stack.push_async_callback(agent.engine.aclose)
        await stack.enter_async_context(serve_worker_http(agent))
        work = [agent.run_role(), agent._follow_readiness(), *(peer.run() for peer in agent.peers.values())]
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


async def ready_page(agent: WorkerAgent) -> tuple[int, dict]:
    url = f"http://{agent.worker.host}:{agent.worker.metrics_port}/ready"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


def test_a_prefill_worker_is_ready_beside_a_sick_decode_engine(config: ClusterConfig, tmp_path: Path):
    async def scenario() -> None:
        async with Engine().served() as own, Engine().served() as well, Engine(is_sick=True).served() as sick:
            agent = PrefillAgent(config, "p0", tmp_path / "scratch")
            async with running(agent, own, Peer("d0", well.url), Peer("d1", sick.url)):
                state = await state_where(agent, ready=True, not_warm_with=["d1"])
                assert [(pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs] == [("d0", "d0-1")]
                assert state.reason == ""
                assert await ready_page(agent) == (200, {"ready": True, "reason": "", "not_warm_with": ["d1"]})
                sick.may_answer.set()  # it has recovered
                await state_where(agent, ready=True, not_warm_with=[])

    asyncio.run(scenario())


def test_it_is_not_ready_without_any_warm_pair(config: ClusterConfig, tmp_path: Path):
    async def scenario() -> None:
        async with Engine().served() as own, Engine(is_sick=True).served() as sick:
            agent = PrefillAgent(config, "p0", tmp_path / "scratch")
            async with running(agent, own, Peer("d1", sick.url)):
                await state_where(agent, ready=False, reason="not warm yet with d1", not_warm_with=["d1"])
                assert (await ready_page(agent))[0] == 503

    asyncio.run(scenario())


def test_a_decode_worker_is_ready_beside_a_sick_prefill_engine(config: ClusterConfig, tmp_path: Path):
    async def scenario() -> None:
        async with Engine().served() as own:
            agent = DecodeAgent(config, "d0", tmp_path / "scratch")
            well, sick = Peer("p0"), Peer("p1")
            async with running(agent, own, well, sick):
                await state_where(agent, ready=False, reason="not warm yet with p0, p1")
                well.hub.update(warm_pairs=[pb.WarmPair(decode_name="d0", decode_incarnation="one")])
                await state_where(agent, ready=True, reason="", not_warm_with=["p1"])

    asyncio.run(scenario())
