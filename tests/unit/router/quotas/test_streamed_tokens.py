"""Streams cost what engines have counted, however few events their clients got."""

import logging
import re
import time
from typing import Any

import pytest
from support.router_stand_ins import (
    FINGERPRINT,
    MODEL,
    ClusterStandIn,
    eventually,
    in_one_write,
    running_cluster,
    stops_after,
)
from support.router_stand_ins.engine import EngineStandIn

from router.api.request_record import UsedTokens
from router.generation.request import Request, SequenceState
from router.identity.access import ANYBODY
from router.protocol.validation import Endpoint

QUOTAS = {"default": {"prompt_tokens_per_min": 100_000, "output_tokens_per_min": 100_000}}
PAIR, UNIFIED = (1, 1, 0), (0, 0, 1)


async def used(cluster: ClusterStandIn) -> tuple[int, int]:
    """Tokens of prompts and of output that the tenant was charged for."""
    page = await cluster.metrics_page()
    found = dict(re.findall(r'^prelude_router_tenant_tokens_total{kind="(\w+)",tenant="other"} (\S+)', page, re.M))
    return int(float(found.get("prompt", 0))), int(float(found.get("output", 0)))


def engine_of(cluster: ClusterStandIn) -> EngineStandIn:
    return (cluster.decode or cluster.unified)[0].engine


async def raw_stream(cluster: ClusterStandIn, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    async with cluster.http.post(f"{cluster.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize("workers", [PAIR, UNIFIED])
async def test_tokens_without_events_are_counted(
    workers: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.api.request_record")
    async with running_cluster(*workers, quotas=QUOTAS) as cluster:
        engine_of(cluster).num_hidden_tokens = 7997
        await raw_stream(cluster, max_tokens=8000, ignore_eos=True, logit_bias={"2": 100})
        assert await eventually(lambda: used(cluster), lambda found: found != (0, 0)) == (7, 8000)
    (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert line["completion_tokens"] == 8000


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [None, {"continuous_usage_stats": True}, {"include_usage": False}, {"include_usage": True}]
)
async def test_clients_get_the_bytes_that_they_asked_for(options: dict[str, bool] | None) -> None:
    """With the usage event, exactly once, or without; in as many pieces as the engine likes."""
    for workers in (PAIR, UNIFIED):
        async with running_cluster(*workers) as cluster:
            engine = engine_of(cluster)
            for behaviours in ([], [in_one_write]):
                engine.behaviours = [*behaviours]
                got = await raw_stream(cluster, **({} if options is None else {"stream_options": options}))
                asked = engine.requests[-1]
                assert asked["stream_options"] == {**(options or {}), "include_usage": True}
                events = engine.events({**asked, "stream_options": options})
                head = f'data: {{"system_fingerprint":"{FINGERPRINT}","id":'.encode()
                expected = [each.replace(b'data: {"id":', head) for each in events]
                assert got == b"".join(expected) + b"data: [DONE]\n\n"
                assert got.count(b'"choices":[]') == bool(options and options.get("include_usage"))
            for worker in cluster.prefill:
                assert not any("stream_options" in each for each in worker.engine.requests)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
async def test_several_choices_are_summed(options: dict[str, bool]) -> None:
    async with running_cluster(*UNIFIED, quotas=QUOTAS) as cluster:
        engine_of(cluster).num_hidden_tokens = 5
        events = await cluster.stream(prompt=["One", "Two"], n=2, max_tokens=10, stream_options=options)
        assert sum(b'"choices":[]' in each for each in events) == len(options)
        assert await eventually(lambda: used(cluster), lambda found: found != (0, 0)) == (14, 32)


@pytest.mark.slow
async def test_a_client_that_leaves_pays_for_what_it_may_have_got() -> None:
    """The router has seen no whole stream, so it does not know how fast engines generate."""
    async with running_cluster(*UNIFIED, quotas=QUOTAS) as cluster:
        engine_of(cluster).behaviours = [stops_after(2)]
        body = {"model": MODEL, "prompt": "Hi", "stream": True, "max_tokens": 500}
        async with cluster.http.post(f"{cluster.url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        assert (await eventually(lambda: used(cluster), lambda found: found[1] > 0))[1] == 500


def stream(age_s: float, num_events: int, *counts: int | None) -> Request:
    """A stream that began so long ago, of sequences whose engines have counted so much."""
    sequences = [SequenceState(num_attempts=1, num_prompt_tokens=7, num_completion_tokens=count) for count in counts]
    started_at = time.monotonic() - age_s
    request = Request("r", Endpoint.CHAT, ANYBODY, started_at=started_at, first_byte_s=0.0, sequences=sequences)
    request.num_events = num_events
    request.sum_usages()
    return request


def test_an_estimate_is_as_fast_as_other_streams() -> None:
    tokens = UsedTokens()

    def output(request: Request, most: int | None = None) -> int:
        request.most_output_tokens = most
        return tokens.of(request)[1]

    assert output(stream(1000, 3, None)) == 3  # nothing to go by
    assert output(stream(1000, 3, None), 800) == 800
    assert output(stream(0.01, 5, 4)) == 4  # too short to learn from
    assert output(stream(1000, 3, 20_000)) == 20_000
    assert output(stream(2000, 3, None)) == pytest.approx(40_000, rel=0.1)
    assert output(stream(2000, 3, None, None)) == pytest.approx(80_000, rel=0.1)
    assert output(stream(2000, 3, None, 100)) == pytest.approx(40_100, rel=0.1)
    assert output(stream(2000, 50_000, None)) == 50_000  # more events than that
    assert output(stream(2000, 3, None), 8000) == 8000  # it cannot have more
    for _ in range(10):
        output(stream(20_000, 3, 20))  # of slow readers
    assert output(stream(2000, 3, None)) > 25_000


def test_a_client_that_leaves_a_whole_answer_pays_for_the_time() -> None:
    """Else it would have engines generate for 256 tokens of its quota, however long."""
    tokens = UsedTokens()
    tokens.of(stream(1000, 3, 20_000))  # 20 tokens/s

    def left(age_s: float, endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> int | None:
        sequences = [SequenceState(num_attempts=1), SequenceState(num_attempts=1)]
        request = Request("r", endpoint, ANYBODY, started_at=time.monotonic() - age_s, sequences=sequences, status=499)
        for name, value in fields.items():
            setattr(request, name, value)
        return tokens.of(request)[1]

    assert left(1) == 512  # as much as was reserved
    assert left(1000, Endpoint.RESPONSES) == pytest.approx(40_000, rel=0.1)
    assert left(1000, num_completion_tokens=7) == 7
    assert left(1000, is_streaming=True) == 0  # no engine has begun
    assert left(1000, status=503) == 0
    for unlike in ({"most_output_tokens": 900}, {"status": None}, {"endpoint": Endpoint.COMPLETIONS}):
        assert left(1000, **unlike) is None  # what was reserved
    assert left(1000, Endpoint.EMBEDDINGS) is None


def test_a_request_that_no_engine_got_costs_nothing() -> None:
    request = Request("r", Endpoint.CHAT, ANYBODY, status=503, sequences=[SequenceState()])
    assert UsedTokens().of(request) == (0, 0)
