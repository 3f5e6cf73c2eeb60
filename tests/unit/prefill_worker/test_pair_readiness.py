"""A worker of pairs is ready with one warm pair: one sick peer keeps nobody out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from support.clusters.paired_agents import Engine, Peer, running, state_where
from support.commands import SMALL_LLAMA

from cluster.agent.worker_agent import WorkerAgent
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.local.ports import with_ports
from decode_worker.agent import DecodeAgent
from engine.errors import EngineError
from engine.supervisor import EngineSnapshot, EngineStatus
from prefill_worker.agent import PrefillAgent


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    data = {"model": {"path": tmp_path, "name": "demo"}, "workers": {name: {"role": roles[name]} for name in roles}}
    return with_ports(ClusterConfig.model_validate(data))


async def ready_page(agent: WorkerAgent) -> tuple[int, dict]:
    url = f"http://{agent.worker.host}:{agent.worker.metrics_port}/ready"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


async def test_a_prefill_worker_is_ready_beside_a_sick_decode_engine(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine().served() as well, Engine(is_sick=True).served() as sick:
        agent = PrefillAgent(config, "p0", tmp_path / "scratch")
        async with running(agent, own, Peer("d0", well.url), Peer("d1", sick.url)):
            state = await state_where(agent, ready=True, not_warm_with=["d1"])
            assert [(pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs] == [("d0", "d0-1")]
            assert state.reason == ""
            assert await ready_page(agent) == (200, {"ready": True, "reason": "", "not_warm_with": ["d1"]})
            sick.may_answer.set()  # it has recovered
            await state_where(agent, ready=True, not_warm_with=[])


async def test_it_is_not_ready_without_any_warm_pair(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine(is_sick=True).served() as sick:
        agent = PrefillAgent(config, "p0", tmp_path / "scratch")
        async with running(agent, own, Peer("d1", sick.url)):
            await state_where(agent, ready=False, reason="not warm yet with d1", not_warm_with=["d1"])
            assert (await ready_page(agent))[0] == 503


async def test_a_decode_worker_is_ready_beside_a_sick_prefill_engine(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own:
        agent = DecodeAgent(config, "d0", tmp_path / "scratch")
        well, sick = Peer("p0"), Peer("p1")
        async with running(agent, own, well, sick):
            await state_where(agent, ready=False, reason="not warm yet with p0, p1")
            well.hub.update(warm_pairs=[pb.WarmPair(decode_name="d0", decode_incarnation="one")])
            await state_where(agent, ready=True, reason="", not_warm_with=["p1"])


async def test_pairs_with_a_suspected_engine_are_warmed_again(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine().served() as theirs:
        agent = PrefillAgent(config, "p0", tmp_path / "scratch")
        peer = Peer("d0", theirs.url)
        async with running(agent, own, peer):
            await state_where(agent, ready=True)
            peer.hub.update(hung=True)
            async with asyncio.timeout(10):
                while agent.hub.state.warm_pairs:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            theirs.may_answer.clear()
            peer.hub.update(hung=False)
            await state_where(agent, not_warm_with=["d0"])
            assert not agent.hub.state.warm_pairs
            theirs.may_answer.set()
            await state_where(agent, not_warm_with=[])
            assert [pair.decode_name for pair in agent.hub.state.warm_pairs] == ["d0"]
            snapshot = EngineSnapshot(EngineStatus.UP, "one", (), 0, "", suspicion="its own engine")
            agent._engine_changed(snapshot)
            assert (agent.hub.state.ready, list(agent.hub.state.warm_pairs)) == (False, [])
            agent._engine_changed(EngineSnapshot(EngineStatus.UP, "one", (), 0, ""))
            await state_where(agent, ready=True)


def test_an_engine_does_not_start_with_other_weights_than_its_worker_is_known_for(
    config: ClusterConfig, tmp_path: Path
):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"some weights")
    agent = PrefillAgent(config, "p0", tmp_path / "scratch")
    agent._check_weights()
    assert agent.describe().base_weights
    weights.write_bytes(b"other weights")
    with pytest.raises(EngineError, match=f"{tmp_path} have changed since this worker started: restart the worker"):
        agent._check_weights()
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngineError, match=r"model\.path: .* cannot be read"):
        agent._check_weights()
