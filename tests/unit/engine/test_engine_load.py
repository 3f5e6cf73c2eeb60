"""What an engine's answer about its load becomes, and the connections of its client."""

import asyncio
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from support.descriptors import no_descriptors
from support.engines.engine_stand_in import Engine
from support.routers.served_routes import served

from engine import supervisor
from engine.client import EngineClient, EngineLoad
from engine.errors import EngineRefused, EngineUnreachable
from process.log import Stopwatch

CORE = {
    "num_running_reqs": 3,
    "num_waiting_reqs": 9,
    "num_used_tokens": 700,
    "num_active_tokens": 500,
    "max_total_num_tokens": 1000,
    "max_running_requests": 64,
    "total_prefill_uncached_tokens": 8000,
    "total_prefill_busy_us": 2_000_000,
    "decode_moments": [40.0, 320.0, 800_000.0, 2560.0, 6.4e6, 320.0],  # steps, sequences, microseconds, …
}
PREFILL = {"mode": "prefill", "prefill_bootstrap_queue_reqs": 5, "prefill_inflight_queue_reqs": 2}
DECODE = {"mode": "decode", "decode_transfer_queue_reqs": 2, "decode_retracted_queue_reqs": 1}
QUEUES = {"prealloc_ready": 4}


async def load_of(*ranks: dict[str, Any]) -> EngineLoad:
    async def answer(request: web.Request) -> web.Response:
        assert request.query["include"] == "core,disagg,queues"
        return web.json_response({"loads": ranks})

    async with served([web.get("/v1/loads", answer)]) as url, aclosing(EngineClient(url, timeout_s=30.0)) as client:
        return await client.load()


async def test_an_engine_is_not_silent_where_its_agent_has_no_descriptors() -> None:
    """Nobody has asked it: the hang watch must not count that against it."""
    async with aclosing(EngineClient("http://127.0.0.1:9", timeout_s=30.0)) as client:
        with no_descriptors():
            with pytest.raises(EngineUnreachable, match="Too many open files"):
                await client.load()
            assert client.num_answers == 1
        with pytest.raises(EngineUnreachable):
            await client.load()
        assert client.num_answers == 1


async def test_prompts_of_a_prefill_engine_that_wait_for_decode() -> None:
    assert await load_of({**CORE, "disaggregation": PREFILL, "queues": QUEUES}) == EngineLoad(
        3, 9, 700, 1000, 5, 2, 64, 500, 8000, 2_000_000, 40, 800_000
    )


async def test_sequences_of_a_decode_engine_without_room_and_without_kv() -> None:
    """Those that have not met their prefill engine yet do not wait for room; retracted ones do."""
    unmet = {**DECODE, "decode_prealloc_queue_reqs": 6}
    load = await load_of({**CORE, "disaggregation": unmet, "queues": QUEUES})
    assert (load.awaiting_room_requests, load.awaiting_kv_requests) == (4 + 1, 2)


@pytest.mark.parametrize("pair", [{}, {"disaggregation": {"mode": "null"}}, {"disaggregation": None}])
async def test_an_engine_without_peers_waits_for_none(pair: dict[str, Any]) -> None:
    load = await load_of({**CORE, **pair, "decode_moments": None})  # no step yet
    assert (load.decode_steps, load.decode_us) == (0, 0)
    assert (load.awaiting_room_requests, load.awaiting_kv_requests, load.used_kv_tokens) == (0, 0, 700)


async def test_ranks_are_added_up_and_none_are_nothing() -> None:
    rank = {**CORE, "num_active_tokens": 900}  # beside other parts of another moment
    load = await load_of(rank, rank)
    assert (load.running_requests, load.max_running_requests, load.active_kv_tokens) == (6, 128, 1400)
    assert await load_of() == EngineLoad()


def test_the_engine_has_these_fields() -> None:
    """SGLang's source at the pin; to import it takes seconds."""
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "srt/managers/load_snapshot.py").read_text()
    for name in {*CORE, *PREFILL, *DECODE, *QUEUES}:
        assert f"    {name}: " in source


@pytest.mark.slow
async def test_idle_connections_are_closed_before_the_engine_closes_them():
    """The engine does so after 5 s. A load sent at that moment would look like the engine's death."""
    async with Engine().served() as engine, aclosing(EngineClient(engine.url)) as client:
        for _ in range(2):
            await client.loaded_adapters()
        assert len(engine.connections) == 1
        await asyncio.sleep(3)
        await client.loaded_adapters()
        assert len(engine.connections) == 2


async def test_an_engine_with_requests_keeps_its_role():
    answers = [(400, "instance is not idle; drain all requests"), (200, "ok"), (400, "instance is unhealthy")]

    async def switch(_request: web.Request) -> web.Response:
        status, message = answers.pop(0)
        return web.json_response({"rid": None, "success": status == 200, "message": message}, status=status)

    async with served([web.post("/pd_role_switch", switch)]) as url, aclosing(EngineClient(url)) as client:
        assert [await client.change_role("decode", 5) for _ in range(2)] == [False, True]
        with pytest.raises(EngineRefused, match="unhealthy"):
            await client.change_role("decode", 5)


@pytest.mark.parametrize("body", [b"\xff", b"{", b"[" * 100_000])
async def test_what_a_peer_answers_that_is_no_json_ends_no_agent(body: bytes) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with served([web.post("/v1/completions", answer)]) as url, aclosing(EngineClient(url)) as client:
        with pytest.raises(EngineRefused, match="/v1/completions answered what is no JSON"):
            await client.complete({}, 5)


@pytest.mark.parametrize("is_seen", [False, True])
async def test_an_engine_that_ends_while_its_role_changes_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    """Its supervision may have seen the end first: then there is no process to kill, and the next engine must live."""
    killed: list[int] = []
    monkeypatch.setattr(supervisor, "kill_group", lambda pid, _signal: killed.append(pid))

    class Client:
        async def loaded_adapters(self) -> list[str]:
            if is_seen:
                engine._process = None
            raise EngineUnreachable("it has ended")

        async def aclose(self) -> None: ...

    spec: Any = SimpleNamespace(client=lambda _timeout_s: Client())
    engine = supervisor.EngineSupervisor(spec, 1, lambda _: None)
    engine._set(supervisor.EngineStatus.UP, incarnation="one")
    engine._process = SimpleNamespace(pid=7)  # type: ignore[assignment]
    await engine.change_role("prefill", Stopwatch())
    assert killed == ([] if is_seen else [7])
