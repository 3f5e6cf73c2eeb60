"""The relay at the level of bytes: back-pressure, pipelines, and what ends a stream."""

import asyncio
import json
import socket
from typing import Any

import pytest
from support.router_stand_ins import ClusterStandIn, eventually, in_one_write, post_bytes
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

WORD = "x" * 100_000
NUM_WORDS = 600  # 60 MB in all; the kernel's buffers take some 20 MB
READ_BYTES = 256 * 1024  # what a transport reads at once


async def connect(cluster: ClusterStandIn) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose own buffers are small."""
    host, port = cluster.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return await asyncio.open_connection(sock=sock, limit=4096)


async def unchunked(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200 ")
    assert b"transfer-encoding: chunked" in head
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    assert await reader.readexactly(2) == b"\r\n"
    return b"".join(parts)


@pytest.mark.slow
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_slow_reader_stops_the_engine_and_gets_everything(num_choices: int, cluster: ClusterStandIn) -> None:
    engine = cluster.decode[0].engine
    num_sent = 0

    async def counts(engine: Any, fields: Any, request: Any) -> Any:
        nonlocal num_sent
        response = await engine.stream(fields, request, 0)
        for event in engine.events(fields):
            await response.write(event)
            num_sent += 1
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.words = (WORD,) * (NUM_WORDS // num_choices)
    engine.behaviours = [counts] * num_choices
    reader, writer = await connect(cluster)
    writer.write(post_bytes(prompt="Hi", stream=True, n=num_choices))

    async def settled() -> bool:
        before = num_sent
        await asyncio.sleep(0.3)
        return 0 < num_sent == before

    await eventually(settled, bool, 30)
    assert num_sent < NUM_WORDS / 2
    (protocol,) = [each for each in cluster.server.server_state.connections if each.flow.write_paused]
    buffered = protocol.transport.get_write_buffer_size()
    assert HIGH_WATER_LIMIT / 2 < buffered < num_choices * (READ_BYTES + 2 * len(WORD)) + HIGH_WATER_LIMIT

    body = await asyncio.wait_for(unchunked(reader), 120)
    assert body.count(WORD.encode()) == num_choices * len(engine.words)
    assert body.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_requests_of_a_pipeline_are_answered_in_order(cluster: ClusterStandIn) -> None:
    cluster.decode[0].engine.event_gap_s = 0.02
    reader, writer = await connect(cluster)
    writer.write(post_bytes(prompt="Hi", stream=True) * 2)
    bodies = [await asyncio.wait_for(unchunked(reader), 120) for _ in range(2)]
    ids = [json.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))["id"] for body in bodies]
    assert ids == [request["rid"] for request in cluster.decode[0].engine.requests]
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    writer.close()


async def test_an_engine_that_does_not_end_its_message_after_the_last_event(cluster: ClusterStandIn) -> None:
    async def never_ends(engine: Any, fields: Any, request: Any) -> None:
        response = await engine.stream(fields, request, 2)
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(3600)

    cluster.decode[0].engine.behaviours = [never_ends]
    events = await asyncio.wait_for(cluster.stream(prompt="Hi"), 120)
    assert (len(events), events[-1]) == (3, b"[DONE]")
    await eventually(lambda: asyncio.sleep(0, cluster.decode[0].engine.num_running), lambda n: n == 0)


async def test_a_stream_in_one_piece(cluster: ClusterStandIn) -> None:
    cluster.decode[0].engine.behaviours = [in_one_write] * 3
    assert len(await cluster.stream(prompt="Hi")) == 4
    assert len(await cluster.stream(prompt="Hi", n=2)) == 7
