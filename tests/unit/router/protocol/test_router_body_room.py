"""Bodies in flight are bounded, large ones are decoded off the event loop, and choices share their prompt's bytes."""

import asyncio
import json
import threading
from pathlib import Path

import msgspec
import pytest
from support.router_stand_ins import ClusterStandIn, after, eventually, running_cluster
from support.routers.keyed_cluster import keyed_cluster

from router.api import request_flow
from router.errors import TooManyBytes
from router.generation.engine_bodies import reader_body
from router.protocol.field_values import Limits
from router.protocol.request_body import BodyBudget
from router.protocol.validation import Endpoint, validate

LONG = "word " * 40_000


async def test_bodies_in_flight_are_bounded() -> None:
    async with running_cluster(0, 0, 1, limits={"in_flight_bytes": 300_000}) as cluster:
        (worker,) = cluster.unified
        worker.engine.behaviours = [after(60)]
        first = asyncio.create_task(cluster.post(prompt=LONG))
        await eventually(lambda: asyncio.sleep(0, worker.engine.num_running), bool)
        for path in ("/v1/completions", "/v1/tokenize"):
            status, answer, headers = await cluster.post(path, prompt=LONG)
            assert (status, answer["error"]["code"]) == (429, "too_many_bytes")
            assert headers["retry-after"] == "1"
        assert (await cluster.post(prompt="Hi"))[0] == 200
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await eventually(cluster.metrics_page, lambda text: "prelude_router_body_bytes 0.0" in text)
        assert (await cluster.post(prompt=LONG))[0] == 200


async def test_prompts_that_the_answer_repeats_count_for_each_choice() -> None:
    """A client that reads slowly has them stay in memory."""
    async with running_cluster(0, 0, 1, limits={"in_flight_bytes": 900_000}) as cluster:
        for fields in ({"prompt": LONG, "n": 4}, {"prompt": [LONG, LONG], "n": 2}):
            for stream in (False, True):
                status, answer, _ = await cluster.post(echo=True, stream=stream, **fields)
                assert (status, answer["error"]["code"]) == (429, "too_many_bytes")
            assert (await cluster.post(**fields))[0] == 200
        assert (await cluster.post(prompt=LONG, n=3, echo=True))[0] == 200
        await eventually(cluster.metrics_page, lambda text: "prelude_router_body_bytes 0.0" in text)


async def test_bytes_count_from_their_arrival_until_the_client_leaves() -> None:
    """Else a few connections that announce long bodies, and send none, would keep everyone else out."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with running_cluster(0, 0, 1, limits={"in_flight_bytes": 300_000}) as cluster:
        _, writer = await cluster.open(head + b"content-length: 9000000\r\n\r\n")
        await writer.drain()
        assert (await cluster.post(prompt=LONG))[0] == 200
        writer.write(b'{"model": "base", "prompt": "' + b"x" * 200_000)
        await eventually(lambda: cluster.post(prompt=LONG), lambda answer: answer[0] == 429)
        writer.transport.abort()
        await eventually(lambda: cluster.post(prompt=LONG), lambda answer: answer[0] == 200)


def test_a_share_is_given_back_whatever_happens() -> None:
    budget = BodyBudget(100)
    with budget.room.growing("acme") as take:
        take(30)
        take(30)
        with pytest.raises(TooManyBytes, match="takes 101 bytes of requests' bodies, and this router may have 100"):
            take(41)
        assert budget.room.num_held == 60
    assert budget.room.num_held == 0


@pytest.mark.slow
async def test_bodies_of_one_tenant_do_not_keep_another_out(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, 0, 0, 1, limits={"in_flight_bytes": 500_000}) as keyed:
        (worker,) = keyed.cluster.unified
        worker.engine.behaviours = [after(60)]
        acme, beta = await keyed.key("acme"), await keyed.key("beta")
        first = asyncio.create_task(keyed.complete(acme, prompt=LONG))
        await eventually(lambda: asyncio.sleep(0, worker.engine.num_running), bool)
        status, answer = await keyed.complete(acme, prompt=LONG)
        assert (status, answer["error"]["code"]) == (429, "too_many_bytes")
        assert "of tenant acme" in answer["error"]["message"]
        assert (await keyed.complete(beta, prompt=LONG))[0] == 200
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_large_bodies_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def noted(*arguments: object) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return validate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(request_flow, "validate", noted)

    async with running_cluster(0, 0, 1) as cluster:
        assert (await cluster.post(prompt="Hi"))[0] == 200
        assert (await cluster.post(prompt=LONG))[0] == 200
        assert (await cluster.post(prompt=LONG, chat_template="x"))[0] == 400
    assert threads == [True, False, False]


def test_choices_share_the_bytes_of_their_prompt() -> None:
    body = json.dumps({"model": "base", "messages": [{"role": "user", "content": LONG}], "n": 4, "seed": 1}).encode()
    sequences = list(validate(Endpoint.CHAT, body, Limits(8, 100)).sequences())
    bodies = [reader_body(each, "base", f"r{n}", namespace="t", revision_id=None) for n, each in enumerate(sequences)]
    for number, parts in enumerate(bodies):
        assert isinstance(parts, tuple)
        assert sum(len(part) for part in parts if isinstance(part, bytes)) < 200
        (prompt,) = (part for part in parts if isinstance(part, memoryview))
        assert prompt.obj is memoryview(sequences[0].fields["messages"]).obj
        found = msgspec.json.decode(b"".join(parts))
        assert (found["rid"], found["messages"][0]["content"]) == (f"r{number}", LONG)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_long_prompt_reaches_both_engines_whole(num_choices: int, cluster: ClusterStandIn) -> None:
    status, answer, _ = await cluster.post(prompt=LONG, n=num_choices)
    assert (status, len(answer["choices"])) == (200, num_choices)
    for worker in cluster.workers:
        assert [each["prompt"] for each in worker.engine.requests] == [LONG] * num_choices
