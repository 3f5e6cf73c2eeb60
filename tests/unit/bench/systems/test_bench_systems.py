"""Requests to each system, and rejection of wrong answers. Mock servers replace the engines."""

import time
from typing import Any

import pytest
from aiohttp import web
from support.bench.streaming_mock import MockServer

from bench.errors import SystemFailed, WrongAnswer
from bench.load.client import Client
from bench.load.options import Endpoint, Engine, Prefill
from bench.systems import systems
from bench.systems.systems import Answer

NAMES = ("sha256:a", "sha256:b")


def answering(status: int = 200, short: int = 0, dropped: tuple[str, ...] = ()) -> MockServer:
    """Each adapter has a token of its own."""

    async def answer(_server: MockServer, _request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if status != 200:
            return web.Response(status=status, text="queue full")
        count, name = body["max_tokens"] - short, body.get("lora_path")
        token = 0 if name is None or name in dropped else 1 + NAMES.index(name)
        choice = {"token_ids": [token] * count, "logprobs": {"token_logprobs": [-1.0] * count}}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        return web.json_response({"choices": [choice], "usage": usage})

    return MockServer(answer)


async def ask(*servers: MockServer, adapter: int | None = 1) -> Answer:
    """One engine, or prefill and decode."""
    async with servers[0].running(), servers[-1].running():
        engine = Engine(servers[-1].url, Prefill(servers[0].url, "127.0.0.1", 77) if servers[1:] else None)
        endpoint = Endpoint(engine.url, "bench", NAMES, "lora_path", engines=(engine,))
        async with Client(endpoint, time.perf_counter) as client:
            return await systems.ask(client, [1, 2, 3], adapter, 4)


async def test_an_engine_gets_the_revision_and_no_stream():
    server = answering()
    assert await ask(server) == ((2, 2, 2, 2), (-1.0,) * 4)
    assert server.bodies[0] == {
        "model": "bench", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "logprobs": 1, "stream": False, "lora_path": "sha256:b",
    }  # fmt: skip
    assert (await ask(answering(), adapter=None))[0] == (0, 0, 0, 0)


async def test_the_answer_of_a_pair_is_decodes():
    prefill = answering()
    assert (await ask(prefill, answering()))[0] == (0, 0, 0, 0)
    assert prefill.bodies[0]["lora_path"] == "sha256:b"


@pytest.mark.parametrize("is_pair", [False, True])
async def test_failures_and_short_answers_do_not_count(is_pair: bool):
    before = [answering()] * is_pair
    with pytest.raises(SystemFailed, match=r"queue full \(status 503"):
        await ask(*before, answering(status=503))
    with pytest.raises(WrongAnswer, match="asked for 4 tokens after 3, got 3 after 3"):
        await ask(*before, answering(short=1))


@pytest.mark.parametrize("name", ["unified", "none"])
@pytest.mark.parametrize("dropped", [(), NAMES[:1]])
async def test_every_adapter_has_an_answer_of_its_own(name: str, dropped: tuple[str, ...]):
    async with answering(dropped=dropped).running() as server:
        endpoint = Endpoint(server.url, "bench", NAMES, "lora_path")
        checking = systems.check_that_adapters_act(name, endpoint, range(2), 1024)
        if name == "unified" and dropped:
            with pytest.raises(WrongAnswer, match="the base model and 2 adapters gave 2 different answers"):
                await checking
        else:
            await checking
    assert [body.get("lora_path") for body in server.bodies] == ([None, *NAMES] if name == "unified" else [])
