"""Draining a worker: at once out of service, requests in flight finish, it stays so until undrained."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.clusters.paired_agents import NoEngine, decode_agent, engine_is, ready, state_where
from support.engines.engine_stand_in import Engine
from support.waiting import until

from cluster.agent import worker_agent
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from decode_worker.agent import DecodeAgent
from engine.arguments import EngineSpec
from engine.client import EngineClient
from engine.supervisor import EngineStatus


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_agent, "_LOAD_POLL_BUSY_S", 0.02)
    monkeypatch.setattr(worker_agent, "_IDLE_FOR_S", 0.1)


@asynccontextmanager
async def draining_agent(folder: Path, **worker) -> AsyncIterator[tuple[DecodeAgent, WorkerControlStub, Engine]]:
    """A decode agent that is ready, its control service, and its engine."""
    agent, engine = decode_agent(folder, **worker), Engine()
    async with ready(agent, engine) as control:
        yield agent, control, engine


async def test_it_is_out_of_service_at_once_and_drained_when_idle(tmp_path: Path):
    async with draining_agent(tmp_path) as (agent, control, engine):
        engine.num_running = 2
        drain = asyncio.ensure_future(control.Drain(pb.DrainRequest(deadline_s=30)))
        await state_where(agent, draining=True, ready=True, reason="draining")
        for _ in range(10):  # longer than an idle engine would take
            await engine.asked_again()
        assert not drain.done()
        engine.num_running = 0
        assert (await drain).idle
        assert agent.hub.state.draining  # it stays out of service
        assert (await control.Drain(pb.DrainRequest(deadline_s=30))).idle


async def test_at_the_deadline_it_says_that_it_is_not_idle(tmp_path: Path):
    async with draining_agent(tmp_path, drain_timeout_s=0.2) as (agent, control, engine):
        engine.num_running = 1
        assert not (await asyncio.wait_for(control.Drain(pb.DrainRequest()), 120)).idle  # the worker's own timeout
        assert agent.hub.state.draining


async def test_an_engine_that_is_slow_to_answer_is_not_taken_for_idle(tmp_path: Path):
    async with draining_agent(tmp_path) as (agent, control, engine):
        engine.num_running, engine.loads_status = 1, 500
        drain = asyncio.ensure_future(control.Drain(pb.DrainRequest(deadline_s=30)))
        for _ in range(10):
            await engine.asked_again()
        assert not drain.done()
        engine_is(agent, EngineStatus.DOWN)  # its requests ended with it
        assert (await drain).idle


async def test_undrain_ends_the_wait_and_brings_it_back(tmp_path: Path):
    async with draining_agent(tmp_path) as (agent, control, engine):
        assert not (await control.Undrain(pb.UndrainRequest())).was_draining
        engine.num_running = 1
        drain = asyncio.ensure_future(control.Drain(pb.DrainRequest(deadline_s=30)))
        await state_where(agent, draining=True)
        assert (await control.Undrain(pb.UndrainRequest())).was_draining
        assert not (await asyncio.wait_for(drain, 120)).idle
        await state_where(agent, draining=False, ready=True, reason="")


async def test_it_stays_drained_when_its_engine_restarts(tmp_path: Path):
    async with draining_agent(tmp_path) as (agent, control, _):
        await control.Drain(pb.DrainRequest(deadline_s=30))
        engine_is(agent, EngineStatus.DOWN)
        engine_is(agent, EngineStatus.UP, "two")
        state = await state_where(agent, ready=True, incarnation="two")
        assert state.draining


@pytest.mark.slow
async def test_sigterm_drains_within_its_bound_and_cannot_be_undone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(worker_agent, "EngineSupervisor", NoEngine)
    monkeypatch.setattr(worker_agent, "_STOP_LIMIT_S", 1e6)  # it would end the tests
    agent, engine = decode_agent(tmp_path, drain_timeout_s=2.0), Engine()
    async with engine.served():
        monkeypatch.setattr(EngineSpec, "client", lambda _spec: EngineClient(engine.url))
        run = asyncio.create_task(agent.run())
        await until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        engine_is(agent, EngineStatus.UP, "one")
        engine.num_running = 1
        began_at = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        await state_where(agent, draining=True)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{agent.worker.control_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="is stopping") as caught:
                await WorkerControlStub(channel).Undrain(pb.UndrainRequest(), timeout=120)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        async with asyncio.timeout(120):
            await run
        assert asyncio.get_running_loop().time() - began_at >= 2.0


async def test_a_worker_leaves_for_another_role_once_it_is_idle(tmp_path: Path):
    async with draining_agent(tmp_path) as (agent, control, engine):

        async def change(role: int, deadline_s: float = 30) -> grpc.StatusCode:
            fields = {"deadline_s": deadline_s, "give_back_after_s": 0.3, "even_last": True}
            try:
                await control.ChangeRole(pb.ChangeRoleRequest(role=role, **fields))
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert await change(pb.ROLE_PREFILL) is grpc.StatusCode.FAILED_PRECONDITION  # no role_changes
        agent.successor = lambda _role: agent
        assert await change(pb.ROLE_UNIFIED) is grpc.StatusCode.FAILED_PRECONDITION
        assert await change(pb.ROLE_DECODE) is grpc.StatusCode.OK  # it is one
        engine.num_running = 1
        assert await change(pb.ROLE_PREFILL, 0.2) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not agent.hub.state.draining  # it takes requests again
        assert agent._next_role.empty()
        await asyncio.sleep(0.4)
        assert not agent.hub.state.gives_back
        fields = {"deadline_s": 30, "give_back_after_s": 0.1, "even_last": True}
        call = control.ChangeRole(pb.ChangeRoleRequest(role=pb.ROLE_PREFILL, **fields))
        await state_where(agent, draining=True, gives_back=True)
        assert await change(pb.ROLE_PREFILL) is grpc.StatusCode.FAILED_PRECONDITION  # another router's is under way
        call.cancel()  # that router has ended
        await state_where(agent, draining=False, gives_back=False)
        assert agent._next_role.empty()
        for num_left in (1, 0):  # an operator's drain outlasts a change that fails, or would succeed
            engine.num_running, num_drains = 1, agent._num_drains
            changing = asyncio.create_task(change(pb.ROLE_PREFILL, 1 + 29 * (num_left == 0)))
            await state_where(agent, draining=True)
            drain = asyncio.ensure_future(control.Drain(pb.DrainRequest(deadline_s=30)))
            await until(lambda before=num_drains: agent._num_drains == before + 2)
            engine.num_running = num_left
            assert await changing is grpc.StatusCode.DEADLINE_EXCEEDED
            assert agent.hub.state.draining
            engine.num_running = 0
            assert (await drain).idle
            await control.Undrain(pb.UndrainRequest())
        engine.num_running = 1
        await control.Drain(pb.DrainRequest(deadline_s=0.1))
        assert await change(pb.ROLE_PREFILL, 0.2) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert agent.hub.state.draining  # as before
        engine.num_running = 0
        assert await change(pb.ROLE_PREFILL) is grpc.StatusCode.OK
        assert agent.hub.state.draining
        assert agent._next_role.get_nowait() == "prefill"


async def test_the_load_of_the_engine_is_published(tmp_path: Path):
    async with draining_agent(tmp_path) as (agent, _, engine):
        engine.num_running = 2
        polling = asyncio.create_task(agent._poll_load(lambda: 7))
        await state_where(agent, progress=7)
        assert agent.hub.state.load.running_requests == 2
        polling.cancel()
