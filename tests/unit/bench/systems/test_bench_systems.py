"""Requests to each system, and rejection of wrong answers. A small HTTP server replaces the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from bench.errors import SystemFailed, WrongAnswer
from bench.load.options import Endpoint, Engine, Prefill
from bench.systems.systems import Answer, CalledSystem, Request, check_that_adapters_act

BASE, ADAPTED = Request([1, 2, 3], None), Request([1, 2, 3], 1)


def answer(body: dict) -> web.Response:
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    tokens = [{"sha256:a": 1, "sha256:b": 2}.get(body.get("lora_path"), 0)] * body["max_tokens"]
    return web.json_response({"choices": [{"token_ids": tokens}], "usage": usage})


def talk(make: Callable, request: Request, reply: Callable = answer):
    """(the answer or the exception, bodies by path) of one request to a system."""
    seen: dict[str, dict] = {}

    async def handle(asked: web.Request) -> web.Response:
        seen[asked.path] = await asked.json()
        return reply(seen[asked.path])

    async def run():
        app = web.Application()
        app.router.add_post("/{engine}/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            system = CalledSystem("tried", make(url))
            async with system.client:
                return await system.send(request, 4)
        finally:
            await runner.cleanup()

    try:
        return asyncio.run(run()), seen
    except (SystemFailed, WrongAnswer) as error:
        return error, seen


def one_engine(url):
    return Endpoint(f"{url}/engine", "bench", ("sha256:a", "sha256:b"), "lora_path")


def pair(url):
    engine = Engine(f"{url}/decode", Prefill(f"{url}/prefill", "127.0.0.1", 77))
    return Endpoint(engine.url, "bench", ("sha256:a", "sha256:b"), "lora_path", engines=(engine,))


def test_one_engine_gets_the_revision():
    got, seen = talk(one_engine, ADAPTED)
    assert (got.tokens, got.num_cached_tokens) == ((2, 2, 2, 2), 1)
    assert seen["/engine/v1/completions"] == {
        "model": "bench",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": False,
        "lora_path": "sha256:b",
    }
    assert "lora_path" not in talk(one_engine, BASE)[1]["/engine/v1/completions"]


def test_the_answer_of_a_pair_is_decodes():
    got, seen = talk(pair, ADAPTED)
    assert seen["/prefill/v1/completions"]["lora_path"] == "sha256:b"
    assert got.tokens == (0, 0, 0, 0)


@pytest.mark.parametrize("make", [one_engine, pair])
def test_failures_and_short_answers_do_not_count(make):
    refused, _ = talk(make, ADAPTED, lambda body: web.Response(status=503, text="queue full"))
    assert isinstance(refused, SystemFailed)
    assert "503" in str(refused)
    assert "queue full" in str(refused)
    short, _ = talk(make, ADAPTED, lambda body: answer({**body, "max_tokens": 3}))
    assert isinstance(short, WrongAnswer)
    assert "asked for 4 tokens after 3, got 3 after 3" in str(short)


def test_nobody_listens():
    refused, _ = talk(lambda _url: Endpoint("http://127.0.0.1:1", "bench"), BASE)
    assert isinstance(refused, SystemFailed)


class Pretended:
    """Answers differently for each adapter that is not dropped."""

    def __init__(self, name: str, dropped: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.dropped = dropped
        self.asked: list[int | None] = []

    async def send(self, request: Request, num_tokens: int, with_logprobs: bool = False) -> Answer:
        self.asked.append(request.adapter)
        adapter = None if request.adapter in self.dropped else request.adapter
        return Answer((7,) * num_tokens, (-1.0 if adapter is None else float(adapter),) * num_tokens, 0)


def test_every_adapter_is_asked_for_an_answer_of_its_own():
    system = Pretended("unified")
    asyncio.run(check_that_adapters_act(system, (0, 1, 5), 1024))
    assert system.asked == [None, 0, 1, 5]
    none = Pretended("none")
    asyncio.run(check_that_adapters_act(none, (0, 1), 1024))
    assert none.asked == []


def test_a_dropped_adapter_is_noticed():
    with pytest.raises(WrongAnswer, match="unified: the base model and 3 adapters gave 3 different answers"):
        asyncio.run(check_that_adapters_act(Pretended("unified", frozenset({2})), range(3), 1024))
