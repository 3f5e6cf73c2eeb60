"""The agent of a unified worker, before a stand-in of its engine's HTTP server: ready when a warm-up has succeeded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.routers.served_routes import kill

from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from engine.client import EngineClient
from engine.supervisor import EngineSnapshot, EngineStatus
from prefill_worker import unified_agent
from prefill_worker.unified_agent import UnifiedAgent
from prefill_worker.warm_up import CACHE_NAMESPACE, WARM_UP_REQUESTS

MODEL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip


class EngineStandIn:
    """Answers completions, with `statuses` first, once it `may_answer`."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.completions: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def complete(self, request: web.Request) -> web.Response:
        self.completions.append(await request.json())
        await self.may_answer.wait()
        return web.json_response({}, status=self.statuses.pop(0) if self.statuses else 200)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return ClusterConfig.model_validate(
        {"model": {"path": tmp_path, "name": "demo"}, "workers": {"u": {"role": "unified", "engine_port": 1}}}
    )


@asynccontextmanager
async def running_agent(config: ClusterConfig, scratch: Path, engine: EngineStandIn) -> AsyncIterator[UnifiedAgent]:
    """The agent's tasks without a supervisor, whose part the tests play."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", engine.complete), web.post("/abort_request", engine.abort)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    agent = UnifiedAgent(config, "u", scratch)
    agent.engine = EngineClient(f"http://127.0.0.1:{port}")
    tasks = [asyncio.create_task(agent.run_role()), asyncio.create_task(agent._follow_readiness())]
    try:
        yield agent
    finally:
        engine.may_answer.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await agent.engine.aclose()
        await kill(runner)


def engine_is(agent: UnifiedAgent, status: EngineStatus, incarnation: str = "") -> None:
    agent._engine_changed(EngineSnapshot(status, incarnation, (), 0, ""))


async def eventually(is_so: Any, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_it_describes_itself(config: ClusterConfig, tmp_path: Path):
    worker = config.workers["u"].model_copy(update={"domain": "rack-1"})
    config = config.model_copy(update={"workers": {**config.workers, "u": worker}})
    agent = UnifiedAgent(config, "u", tmp_path / "scratch")
    description = agent.describe()
    assert (description.role, description.domain) == (pb.ROLE_UNIFIED, "rack-1")
    assert (description.kv_host, description.kv_bootstrap_port) == ("", 0)
    assert description.max_adapter_rank == config.adapter_limits.max_rank
    assert tuple(description.target_modules) == config.adapter_limits.target_modules
    assert agent.peers == {}


async def test_ready_after_its_warm_up(config: ClusterConfig, tmp_path: Path):
    engine = EngineStandIn()
    engine.may_answer.clear()
    async with running_agent(config, tmp_path / "scratch", engine) as agent:
        engine_is(agent, EngineStatus.UP, "one")
        await eventually(lambda: engine.completions)
        assert (agent.hub.state.ready, agent.hub.state.reason) == (False, "its engine is not warm yet")
        engine.may_answer.set()
        await eventually(lambda: agent.hub.state.ready)
        assert agent.hub.state.reason == ""
        assert len(engine.completions) == len(WARM_UP_REQUESTS)
        for body in engine.completions:
            assert (body["model"], body["extra_key"]) == ("demo", CACHE_NAMESPACE)
            assert body["max_tokens"] > 1  # a decode step too
            assert not {"lora_path", "bootstrap_room"} & body.keys()
        asked = {name for body in engine.completions for name in body}
        assert {"top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "logprobs", "regex"} <= asked

        engine_is(agent, EngineStatus.DOWN)
        await eventually(lambda: not agent.hub.state.ready)
        engine.may_answer.clear()
        engine_is(agent, EngineStatus.UP, "two")
        await eventually(lambda: len(engine.completions) == len(WARM_UP_REQUESTS) + 1)
        assert not agent.hub.state.ready
        engine.may_answer.set()
        await eventually(lambda: agent.hub.state.ready)

    assert engine.aborted == []


async def test_a_failed_warm_up_is_aborted_and_retried(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(unified_agent, "_RETRY_S", 0.01)

    engine = EngineStandIn(500, 503)
    async with running_agent(config, tmp_path / "scratch", engine) as agent:
        engine_is(agent, EngineStatus.UP, "one")
        await eventually(lambda: agent.hub.state.ready)
    rids = [body["rid"] for body in engine.completions]
    assert len(set(rids)) == 2 + len(WARM_UP_REQUESTS)
    assert engine.aborted == rids[:2]


async def test_a_warm_up_of_an_engine_that_ended_counts_for_nothing(config: ClusterConfig, tmp_path: Path):
    engine = EngineStandIn()
    engine.may_answer.clear()
    async with running_agent(config, tmp_path / "scratch", engine) as agent:
        engine_is(agent, EngineStatus.UP, "one")
        await eventually(lambda: engine.completions)
        engine_is(agent, EngineStatus.DOWN)
        engine_is(agent, EngineStatus.UP, "two")
        engine.may_answer.set()
        await eventually(lambda: agent.hub.state.ready)
        assert len(engine.completions) == 2 * len(WARM_UP_REQUESTS)


async def test_a_suspected_engine_has_to_answer_before_it_is_taken_back(config: ClusterConfig, tmp_path: Path):
    engine = EngineStandIn()
    async with running_agent(config, tmp_path / "scratch", engine) as agent:
        engine_is(agent, EngineStatus.UP, "one")
        await eventually(lambda: agent.hub.state.ready)
        num_asked = len(engine.completions)
        engine.may_answer.clear()
        reason = "the engine's scheduler-0 has shown no progress for 10 s"
        agent._engine_changed(EngineSnapshot(EngineStatus.UP, "one", (), 0, "", suspicion=reason))
        state = agent.hub.state
        assert (state.ready, state.hung, state.reason, state.incarnation) == (False, True, reason, "one")
        assert agent._warm_incarnation == "one"  # a bound that holds once it is warm must not end here
        await eventually(lambda: len(engine.completions) > num_asked)  # a small request
        engine_is(agent, EngineStatus.UP, "one")  # it shows progress
        await eventually(lambda: agent.hub.state.reason == "its engine is not warm yet")
        assert (agent.hub.state.ready, agent.hub.state.hung) == (False, False)
        engine.may_answer.set()
        await eventually(lambda: agent.hub.state.ready)
