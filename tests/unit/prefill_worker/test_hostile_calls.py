"""Hostile gRPC requests to an agent: refused by bounds, and the worker is as ready afterwards as before."""

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.adapters.held_adapters import StoredAdapters, until
from support.clusters.running_agent import RunningAgent, refused, running_agent

from cluster.control import control_pb2 as pb
from cluster.control.bounds import out_of_bounds

INVALID = grpc.StatusCode.INVALID_ARGUMENT
REVISION = "sha256:" + "5" * 64
METHODS = pb.DESCRIPTOR.services_by_name["WorkerControl"].methods
REQUESTS = {method.name: getattr(pb, method.input_type.name) for method in METHODS}
_CALLS_AT_ONCE = 20


def put(**begin: Any) -> pb.PutAdapterRequest:
    fields = {"revision_id": REVISION, "content_bytes": 1, "content_sha256": "0" * 64, **begin}
    return pb.PutAdapterRequest(begin=pb.PutAdapterBegin(**fields))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.WatchStateRequest(heartbeat_s=-1), "heartbeat_s must be 0, or from 0.05 to 3600 seconds (found -1.0)"),
        (pb.WatchStateRequest(heartbeat_s=1e-9), "heartbeat_s must be"),
        (pb.WatchStateRequest(heartbeat_s=math.nan), "(found nan)"),
        (pb.WatchStateRequest(heartbeat_s=math.inf), "(found inf)"),
        (pb.DrainRequest(deadline_s=-1), "deadline_s must be from 0 to 604800 seconds (found -1.0)"),
        (pb.DrainRequest(deadline_s=math.nan), "deadline_s must be"),
        (pb.EnsureAdapterRequest(revision_id=REVISION, deadline_s=math.inf), "deadline_s must be"),
        (
            pb.EnsureAdapterRequest(revision_id="sha256:../../etc"),
            "revision_id must be 'sha256:' and 64 lower-case hex",
        ),
        (pb.EnsureAdapterRequest(revision_id=f"{REVISION}x0.500"), "revision_id must be"),
        (pb.PinAdapterRequest(revision_id=REVISION.upper()), "revision_id must be"),
        (pb.EvictAdapterRequest(revision_id=REVISION + "\n"), "revision_id must be"),
        (put(content_bytes=2**63), "begin.content_bytes must be"),
        (put(content_sha256="x"), "begin.content_sha256 must be"),
        (pb.PutAdapterRequest(chunk=bytes(2**20 + 1)), "chunk must be"),
        (pb.EnsureAdapterRequest(revision_id=REVISION, tenant="a" * 257), "tenant must be at most 256 characters"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_bounds(request_: Message, words: str):
    assert words in (out_of_bounds(request_) or "")


async def test_a_heartbeat_below_zero_is_refused_and_nothing_spins(running: RunningAgent):
    for heartbeat_s in (-1.0, 1e-12, math.nan):
        async with refused(INVALID, "heartbeat_s must be"):
            await running.control.WatchState(pb.WatchStateRequest(heartbeat_s=heartbeat_s), timeout=120).read()
    assert len(running.agent.hub._watchers) == 0


async def test_a_push_of_other_messages_than_chunks_is_refused(stored: StoredAdapters, running: RunningAgent):
    for second in (put(), pb.PutAdapterRequest(), pb.PutAdapterRequest(chunk=b"")):
        async with refused(INVALID):
            await running.control.PutAdapter(_stream(put(content_bytes=4), second), timeout=120)
    await _is_unharmed(running, stored)


_NUMBERS = st.one_of(
    st.sampled_from([0.0, -1.0, 0.01, 0.2, 1e-300, math.nan, math.inf, -math.inf, 1e18]), st.floats(width=64)
)
_BAD_TEXTS = ("", "0" * 64, "sha256:", "sha256:" + "g" * 64, "../" * 20, "\x00", "ſha256:" + "0" * 64)
_TEXTS = st.one_of(st.just(REVISION), st.sampled_from(_BAD_TEXTS), st.just("a" * 300), st.text(max_size=40))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return _NUMBERS
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.one_of(st.integers(0, 2), st.integers(-(2**31), 2**31 - 1))
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return st.one_of(st.binary(max_size=64), st.sampled_from([2**20, 2**20 + 1]).map(bytes))
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXTS
        case FieldDescriptor.CPPTYPE_UINT32:
            return st.integers(0, 2**32 - 1)
        case FieldDescriptor.CPPTYPE_UINT64:
            return st.one_of(st.integers(0, 8), st.integers(0, 2**64 - 1))
    return _messages(getattr(pb, field.message_type.name))


def _messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of the kind: each field unset or hostile."""
    fields = {field.name: _values(field) for field in kind.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


def _calls() -> st.SearchStrategy[tuple[str, list[bytes]]]:
    """A method, and the bytes of the requests that it is sent: messages of its kind, or anything."""
    anything = st.lists(st.binary(max_size=80), max_size=2)
    calls = []
    for name, kind in REQUESTS.items():
        of_its_kind = st.lists(_messages(kind).map(lambda message: message.SerializeToString()), min_size=1, max_size=3)
        calls.append(st.tuples(st.just(name), of_its_kind | anything))
    return st.one_of(calls)


@pytest.mark.slow
def test_a_thousand_hostile_requests(stored: StoredAdapters, tmp_path: Path):
    with asyncio.Runner() as runner:
        manager = running_agent(stored, tmp_path)
        running = runner.run(manager.__aenter__())
        try:

            @settings(
                max_examples=1000 // _CALLS_AT_ONCE,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.lists(_calls(), min_size=_CALLS_AT_ONCE, max_size=_CALLS_AT_ONCE))
            def survives(calls: list[tuple[str, list[bytes]]]) -> None:
                runner.run(_sent(running, calls))

            survives()
            runner.run(_is_unharmed(running, stored))
        finally:
            runner.run(manager.__aexit__(None, None, None))


async def _sent(running: RunningAgent, calls: list[tuple[str, list[bytes]]]) -> None:
    """Send the calls at once; every one ends with a response or a status that is not a fault of the agent's code."""
    codes = await asyncio.gather(*(_send(running.channel, *call) for call in calls))
    for (method, requests), (code, details) in zip(calls, codes, strict=True):
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            raise AssertionError(f"{method} of {requests!r} ended with {code}: {details}")
    await running.control.Undrain(pb.UndrainRequest(), timeout=120)
    assert (await running.control.Describe(pb.DescribeRequest(), timeout=120)).name == "w"


async def _send(channel: grpc.aio.Channel, method: str, requests: list[bytes]) -> tuple[grpc.StatusCode, str]:
    path = f"/prelude.control.v1.WorkerControl/{method}"
    one = requests[0] if requests else b""
    try:
        if method == "PutAdapter":
            await channel.stream_unary(path)(_stream(*requests), timeout=0.3)
        elif method == "WatchState":
            stream = channel.unary_stream(path)(one, timeout=0.3)
            await stream.read()
            stream.cancel()
        else:
            await channel.unary_unary(path)(one, timeout=0.3)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    except asyncio.CancelledError:  # grpc's client, whose write came after the agent had ended the call
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return grpc.StatusCode.CANCELLED, ""
    return grpc.StatusCode.OK, ""


async def _stream(*messages: Any):
    for message in messages:
        yield message


async def _is_unharmed(running: RunningAgent, stored: StoredAdapters) -> None:
    """Nothing that was refused has left anything, and an adapter can be loaded."""
    agent = running.agent
    assert not agent.hub.state.draining
    assert agent._residency is not None
    queue, hub = agent._residency._queue, agent.hub
    await until(lambda: not queue.keys and not hub._watchers)
    host = agent._residency._host
    await until(lambda: host.used_bytes == 0)
    assert hub.resident == set()
    assert (await running.ensure(stored.ids[0])).load_s > 0
