"""Connections to engines: a request gets room for all of its calls, or none; a tenant gets half."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from support.router_stand_ins import eventually, hangs, running_cluster
from support.routers.router_calls import has_phase

from router.errors import RouterExhausted, answer_of
from router.generation.engine_room import EngineRoom


def test_one_tenant_leaves_half_to_others():
    room = EngineRoom(100)
    with ExitStack() as held:
        held.enter_context(room.share("a", 40))
        with pytest.raises(RouterExhausted, match=r"tenant a .* 40 connections .* 50"), room.share("a", 11):
            pass
        held.enter_context(room.share("a", 10))
        held.enter_context(room.share("b", 50))
        with pytest.raises(RouterExhausted, match="too few for 1 more"), room.share(None, 1):
            pass
    with room.share("a", 100):  # its only one may take more
        pass
    with room.share(None, 60), room.share(None, 40):
        pass


def test_a_request_that_never_fits_is_not_asked_to_come_again():
    room = EngineRoom(100)
    with pytest.raises(RouterExhausted, match=r"takes 101 .* may have 100") as caught, room.share(None, 101):
        pass
    assert (caught.value.http_status, "retry-after" in answer_of(caught.value).headers) == (503, False)


def test_room_is_given_back_when_a_request_fails():
    room = EngineRoom(10)
    for _ in range(3):
        with pytest.raises(KeyError), room.share("a", 10):
            raise KeyError


def test_a_router_holds_no_more_connections_than_its_room():
    async def scenario() -> None:
        async with running_cluster(1, 1, max_engine_connections=8) as cluster:
            cluster.decode[0].engine.behaviours = [hangs] * 3
            waiting = asyncio.create_task(cluster.post(prompt="Hi", n=3))
            is_under_way = has_phase("waiting_first_event")
            await eventually(lambda: cluster.admin("/debug/requests"), is_under_way)
            await eventually(lambda: asyncio.sleep(0, len(cluster.decode[0].engine.bodies)), lambda seen: seen == 3)
            status, answer, headers = await cluster.post(prompt="Hi", n=2)
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "router_exhausted", "1")
            assert len(cluster.decode[0].engine.bodies) == 3  # no engine has heard of it
            assert (await cluster.post(prompt="Hi"))[0] == 200
            waiting.cancel()
            status, answer, headers = await cluster.post(prompt="Hi", n=5)
            assert (status, answer["error"]["code"]) == (503, "router_exhausted")
            assert "retry-after" not in headers
            page = await cluster.metrics_page()
            assert 'prelude_router_exhausted_total{reason="connections"} 2.0' in page

    asyncio.run(scenario())
