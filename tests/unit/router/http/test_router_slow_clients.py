"""Clients that send nothing, that write slowly and that do not read: little memory each, and nobody else notices."""

import asyncio
import gc
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import psutil
import pytest
from aiohttp import web
from support.router_stand_ins import ClusterStandIn, EngineStandIn, eventually, post_bytes, running_cluster

from cluster.config.router import RouterConfig
from router.http.connections import ConnectionLimits

NUM_EVENTS, WORD = 512, "x" * 2**16  # 32 MiB of stream for each client, more than the kernel buffers
IDLE_BYTES, SLOW_BYTES = 32 * 2**10, 2**20  # of memory, each; in this process are router and stand-ins

_limits_of = ConnectionLimits.of


def patient(config: RouterConfig) -> ConnectionLimits:
    """So that the first are there when the last comes."""
    return replace(_limits_of(config), header_timeout_s=600, body_gap_timeout_s=600)


async def floods(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Write a long stream as fast as the router reads it."""
    response = await engine.stream(fields, request, 0)
    event = engine.events(fields)[0].replace(engine.words[0].encode(), WORD.encode())
    for _ in range(NUM_EVENTS):
        await response.write(event)
    await response.write(b"data: [DONE]\n\n")
    return response


@contextmanager
def open_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@mock.patch.object(ConnectionLimits, "of", patient)
async def check(num_idle: int, num_slow: int) -> None:
    async with running_cluster(0, 0, 1, event_gap_timeout_s=600) as cluster:
        assert (await cluster.post(prompt="Hi"))[0] == 200
        gc.collect()
        process, engine = psutil.Process(), cluster.unified[0].engine
        before, sockets = process.memory_info().rss, []
        try:
            engine.behaviours += [floods] * num_slow
            streamed = post_bytes(prompt="Hi", stream=True)
            for data in [streamed] * num_slow + [streamed[:-5]] * num_slow + [b""] * num_idle:
                sockets.append(each := socket.socket())
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.setblocking(False)
                address = ("127.0.0.1", int(cluster.url.rpartition(":")[2]))
                await asyncio.get_running_loop().sock_connect(each, address)
                await asyncio.get_running_loop().sock_sendall(each, data)
            await eventually(lambda: _num_relaying(cluster), lambda found: found == num_slow, within_s=120)
            for _ in range(20):
                async with asyncio.timeout(10):
                    assert (await cluster.post(prompt="Hi"))[0] == 200
            assert engine.num_running == num_slow  # no stream is through: nobody read it, and nobody kept it
            grown, allowed = process.memory_info().rss - before, 2**23 + num_idle * IDLE_BYTES + num_slow * SLOW_BYTES
            assert grown < allowed, f"{grown / 2**20:.0f} MiB, allowed are {allowed / 2**20:.0f}"
        finally:
            for each in sockets:
                each.close()
        await eventually(lambda: asyncio.sleep(0, engine.num_running), lambda running: running == 0, within_s=120)
        assert await _num_relaying(cluster) == 0
        assert (await cluster.post(prompt="Hi"))[0] == 200


async def _num_relaying(cluster: ClusterStandIn) -> int:
    requests = (await cluster.admin("/debug/requests"))[1]["requests"]
    return sum(sequence["phase"] == "relaying" for request in requests for sequence in request["sequences"])


@pytest.mark.slow
def test_some_slow_clients_harm_nobody():
    with open_files(1000):
        asyncio.run(check(num_idle=200, num_slow=20))


@pytest.mark.long
def test_two_thousand_idle_and_hundreds_of_slow_clients_harm_nobody():
    with open_files(8000):
        asyncio.run(check(num_idle=2000, num_slow=200))
