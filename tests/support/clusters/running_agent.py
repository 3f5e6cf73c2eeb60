"""An agent that holds adapters, over its real gRPC service; only its engine is a stand-in."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.adapters.held_adapters import StoredAdapters
from support.adapters.tiny_model import write_model_config
from support.clusters.configs import config_of
from support.constants import with_constants
from support.engines.engine_stand_in import Engine

from cluster.config.schema import ClusterConfig, ResidencyConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.service import serve_control
from cluster.local.ports import with_ports
from engine.client import EngineClient
from engine.supervisor import EngineSnapshot, EngineStatus
from prefill_worker.adapter_holder import AdapterHolder
from prefill_worker.agent import PrefillAgent
from prefill_worker.unified_agent import UnifiedAgent
from process.lifetime import meanwhile


@dataclass
class RunningAgent:
    agent: AdapterHolder
    control: WorkerControlStub
    channel: grpc.aio.Channel
    engine: Engine

    def engine_is(self, status: EngineStatus, incarnation: str = "") -> None:
        self.agent._engine_changed(EngineSnapshot(status, incarnation, (), 0, ""))

    async def ensure(
        self,
        revision_id: str,
        deadline_s: float = 5,
        metadata: tuple[tuple[str, str], ...] = (),
    ):
        request = pb.EnsureAdapterRequest(revision_id=revision_id, deadline_s=deadline_s)
        return await self.control.EnsureAdapter(request, timeout=120, metadata=metadata)


def configured(stored: StoredAdapters, tmp_path: Path, role: str, engine: Engine, **residency) -> ClusterConfig:
    model = {"path": write_model_config(tmp_path / "model"), "name": "demo", "dtype": "float32"}
    config = config_of(
        {"w": {"role": role, "engine_port": engine._port}, **({"d": "decode"} if role == "prefill" else {})},
        model=model,
        integrity={"accept_unverified": True},
        store={"url": f"file://{stored.folder}"},
        residency=with_constants(ResidencyConfig, **{"lease_s": 0.05, "host_bytes": 100 * stored.room, **residency}),
    )
    return with_ports(config)


@asynccontextmanager
async def running_agent(
    stored: StoredAdapters, tmp_path: Path, role: str = "unified", **residency
) -> AsyncIterator[RunningAgent]:
    async with Engine().served() as engine:
        config = configured(stored, tmp_path, role, engine, **residency)
        agent = (UnifiedAgent if role == "unified" else PrefillAgent)(config, "w", tmp_path / "scratch")
        async with (
            aclosing(EngineClient(engine.url)) as agent.engine,
            agent.resources(),
            serve_control(agent),
            grpc.aio.insecure_channel(f"127.0.0.1:{agent.worker.control_port}") as channel,
            meanwhile(agent.run_resources()),
        ):
            running = RunningAgent(agent, WorkerControlStub(channel), channel, engine)
            running.engine_is(EngineStatus.UP, "one")
            yield running


@asynccontextmanager
async def refused(status: grpc.StatusCode, words: str = "") -> AsyncIterator[dict[str, str]]:
    """Expect a call to fail with the status. Yields the trailing metadata."""
    metadata: dict[str, str] = {}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield metadata
    assert caught.value.code() is status, caught.value
    assert words in (caught.value.details() or "")
    metadata |= {str(key): str(value) for key, value in caught.value.trailing_metadata() or ()}
