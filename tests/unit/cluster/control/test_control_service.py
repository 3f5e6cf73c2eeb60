"""The control service over real gRPC: residency of any size, and roles without adapters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.adapters.tiny_model import TINY
from support.clusters.paired_agents import decode_agent

from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.service import serve_control
from cluster.errors import ConfigError, StartError
from decode_worker.agent import DecodeAgent


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[DecodeAgent, WorkerControlStub]]:
    agent = decode_agent(tmp_path)
    async with serve_control(agent), grpc.aio.insecure_channel(f"127.0.0.1:{agent.worker.control_port}") as channel:
        yield agent, WorkerControlStub(channel)


async def test_a_hundred_thousand_adapters_fit_through_the_stream(tmp_path: Path):
    ids = [f"sha256:{number:064x}" for number in range(100_000)]

    async with served(tmp_path) as (agent, control):
        agent.hub.change_on_disk(ids, [])
        for each in ids:
            agent.hub.add_resident(each)
        stream = control.WatchState(pb.WatchStateRequest(heartbeat_s=30))
        resident: set[str] = set()
        on_disk: set[str] = set()

        async def follow_until(is_so) -> int:
            count = 0
            while not is_so():
                state = await asyncio.wait_for(stream.read(), 120)
                delta = state.residency
                assert state.ByteSize() < 1024**2
                if delta.snapshot:
                    resident.clear()
                    on_disk.clear()
                resident.update(delta.resident)
                resident.difference_update(delta.evicted)
                on_disk.update(delta.on_disk)
                on_disk.difference_update(delta.off_disk)
                count += 1
            return count

        assert await follow_until(lambda: len(on_disk) == 100_000) == 20
        assert resident == on_disk == set(ids)
        agent.hub.clear_resident()
        agent.hub.change_on_disk(["sha256:new"], ids[:50_000])
        assert await follow_until(lambda: not resident and len(on_disk) == 50_001) == 16
        stream.cancel()


async def test_what_changes_while_a_snapshot_is_sent_comes_after_it(tmp_path: Path):
    async with served(tmp_path) as (agent, _):
        for number in range(25_000):
            agent.hub.add_resident(f"r{number:05}")
        watch = agent.hub.watch(30)
        parts = [await anext(watch)]
        agent.hub.remove_resident("r00001")
        agent.hub.remove_resident("r24999")
        agent.hub.update(draining=True)
        parts += [await anext(watch) for _ in range(5)]
        assert [len(part.residency.resident) for part in parts] == [10_000, 10_000, 5_000, 0, 0, 0]
        assert [part.residency.snapshot for part in parts] == [True] + [False] * 5
        assert [list(part.residency.evicted) for part in parts[3:]] == [["r00001"], ["r24999"], []]
        assert [part.draining for part in parts] == [False] * 5 + [True]


async def test_streams_of_an_agent_that_ends_are_ended(tmp_path: Path):
    """At once, and not by the server when its time to stop is over: then the agent of the next role has the port."""
    agent = decode_agent(tmp_path)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{agent.worker.control_port}") as channel:
        async with serve_control(agent):
            stream = WorkerControlStub(channel).WatchState(pb.WatchStateRequest(heartbeat_s=3600))
            states = aiter(stream)
            assert not (await anext(states)).draining
            agent.hub.update(draining=True)
        assert [state.draining async for state in states] == [True, True]
        assert await stream.code() is grpc.StatusCode.OK


async def test_no_two_agents_share_a_port(tmp_path: Path):
    """gRPC would let them, and each would get a part of the calls."""
    async with served(tmp_path) as (agent, _):
        with pytest.raises(StartError, match=f"control_port: 127.0.0.1:{agent.worker.control_port} is not available"):
            async with serve_control(agent):
                pass


async def test_a_worker_without_adapters_says_so(tmp_path: Path):
    async with served(tmp_path) as (_, control):
        for call, request in (
            (control.EnsureAdapter, pb.EnsureAdapterRequest(revision_id="sha256:" + "0" * 64)),
            (control.PinAdapter, pb.PinAdapterRequest(revision_id="sha256:" + "0" * 64)),
            (control.PutAdapter, iter([pb.PutAdapterRequest(chunk=b"x")])),
            (control.EvictAdapter, pb.EvictAdapterRequest(revision_id="sha256:" + "0" * 64)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="worker d holds no adapters") as caught:
                await call(request, timeout=120)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_refusal_arrives_while_the_adapter_is_still_being_sent(tmp_path: Path):
    """gRPC's client reports an internal error if the call ends under a message that it sends."""

    async def parts() -> AsyncIterator[pb.PutAdapterRequest]:
        for _ in range(50):
            yield pb.PutAdapterRequest(chunk=bytes(100_000))
            await asyncio.sleep(0)

    async with served(tmp_path) as (_, control):
        for _ in range(100):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await control.PutAdapter(parts(), timeout=120)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION, refused.value.details()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "model.path: .*GPT2LMHeadModel"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]},
            "worker d cannot start: .* without experts",
        ),
    ],
)
def test_a_base_model_that_engines_do_not_run_is_refused_at_start(fields, says, tmp_path: Path):
    with pytest.raises(ConfigError, match=says):
        decode_agent(tmp_path, TINY | fields)
