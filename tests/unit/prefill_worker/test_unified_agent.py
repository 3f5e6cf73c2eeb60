"""The agent of a unified worker, before a stand-in of its engine's HTTP server: ready when a warm-up has succeeded."""

from pathlib import Path

import pytest
from support.adapters.held_adapters import until
from support.adapters.tiny_model import write_model_config
from support.clusters.configs import config_of
from support.clusters.paired_agents import running
from support.engines.engine_stand_in import Engine

from cluster.control import control_pb2 as pb
from cluster.local.ports import with_ports
from engine.supervisor import EngineSnapshot, EngineStatus
from prefill_worker import unified_agent
from prefill_worker.unified_agent import UnifiedAgent
from prefill_worker.warm_up import CACHE_NAMESPACE, WARM_UP_REQUESTS


@pytest.fixture
def agent(tmp_path: Path) -> UnifiedAgent:
    config = config_of({"u": {"role": "unified", "domain": "rack-1"}}, write_model_config(tmp_path))
    return UnifiedAgent(with_ports(config), "u", tmp_path / "scratch")


def engine_is(agent: UnifiedAgent, status: EngineStatus, incarnation: str = "", suspicion: str = "") -> None:
    agent._engine_changed(EngineSnapshot(status, incarnation, (), 0, "", suspicion))


def test_it_describes_itself(agent: UnifiedAgent):
    description = agent.describe()
    assert (description.role, description.domain) == (pb.ROLE_UNIFIED, "rack-1")
    assert (description.kv_host, description.kv_bootstrap_port) == ("", 0)
    assert description.metrics_port == agent.worker.metrics_port > 0
    assert description.max_adapter_rank == agent.config.adapter_limits.max_rank
    assert tuple(description.target_modules) == agent.config.adapter_limits.target_modules
    assert agent.peers == {}


async def test_ready_after_its_warm_up(agent: UnifiedAgent):
    async with Engine(is_sick=True).served() as engine, running(agent, engine):
        await until(lambda: engine.completions)
        assert (agent.hub.state.ready, agent.hub.state.reason) == (False, "its engine is not warm yet")
        engine.may_answer.set()
        await until(lambda: agent.hub.state.ready)
        assert agent.hub.state.reason == ""
        assert len(engine.completions) == len(WARM_UP_REQUESTS)
        for body in engine.completions:
            assert (body["model"], body["extra_key"]) == ("demo", CACHE_NAMESPACE)
            assert body["max_tokens"] > 1  # a decode step too
            assert not {"lora_path", "bootstrap_room"} & body.keys()
        asked = {name for body in engine.completions for name in body}
        assert {"top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "logprobs", "regex"} <= asked

        engine_is(agent, EngineStatus.DOWN)
        await until(lambda: not agent.hub.state.ready)
        engine.may_answer.clear()
        engine_is(agent, EngineStatus.UP, "two")
        await until(lambda: len(engine.completions) == len(WARM_UP_REQUESTS) + 1)
        assert not agent.hub.state.ready
        engine.may_answer.set()
        await until(lambda: agent.hub.state.ready)
    assert engine.aborted == []


async def test_a_failed_warm_up_is_aborted_and_retried(agent: UnifiedAgent, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unified_agent, "_RETRY_S", 0.01)
    async with Engine(500, 503).served() as engine, running(agent, engine):
        await until(lambda: agent.hub.state.ready)
    rids = [body["rid"] for body in engine.completions]
    assert len(set(rids)) == 2 + len(WARM_UP_REQUESTS)
    assert engine.aborted == rids[:2]


async def test_a_warm_up_of_an_engine_that_ended_counts_for_nothing(agent: UnifiedAgent):
    async with Engine(is_sick=True).served() as engine, running(agent, engine):
        await until(lambda: engine.completions)
        engine_is(agent, EngineStatus.DOWN)
        engine_is(agent, EngineStatus.UP, "two")
        engine.may_answer.set()
        await until(lambda: agent.hub.state.ready)
        assert len(engine.completions) == 2 * len(WARM_UP_REQUESTS)


async def test_a_suspected_engine_has_to_answer_before_it_is_taken_back(agent: UnifiedAgent):
    async with Engine().served() as engine, running(agent, engine):
        await until(lambda: agent.hub.state.ready)
        num_asked = len(engine.completions)
        engine.may_answer.clear()
        reason = "the engine's scheduler-0 has shown no progress for 10 s"
        engine_is(agent, EngineStatus.UP, "one", reason)
        state = agent.hub.state
        assert (state.ready, state.hung, state.reason, state.incarnation) == (False, True, reason, "one")
        assert agent._warm_incarnation == "one"  # a bound that holds once it is warm must not end here
        await until(lambda: len(engine.completions) > num_asked)  # a small request
        engine_is(agent, EngineStatus.UP, "one")  # it shows progress
        await until(lambda: agent.hub.state.reason == "its engine is not warm yet")
        assert (agent.hub.state.ready, agent.hub.state.hung) == (False, False)
        engine.may_answer.set()
        await until(lambda: agent.hub.state.ready)
