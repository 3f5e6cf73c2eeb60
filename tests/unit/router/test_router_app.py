"""The whole router over real sockets, against stand-ins of engines and agents.

This proves how the router behaves, in particular when workers fail; see router_stand_ins for what it does not prove.
"""

import asyncio
import json
from typing import Any

import pytest
from support.router_stand_ins import (
    FINGERPRINT,
    MESSAGES,
    MODEL,
    REVISION_ID,
    TEXT,
    ClusterStandIn,
    answers,
    eventually,
    running_cluster,
    stops_after,
)


class TestOneSequence:
    async def test_chat_with_an_adapter(self, cluster: ClusterStandIn) -> None:
        completions = cluster.client.chat.completions.with_raw_response
        raw = await completions.create(model=MODEL, messages=MESSAGES, extra_body={"adapter": "a0"})
        answer = raw.parse()
        assert answer.choices[0].message.content == TEXT
        assert answer.usage.completion_tokens == 3
        assert answer.model == MODEL
        assert answer.system_fingerprint == f"{FINGERPRINT}-{REVISION_ID[7:19]}"
        assert raw.headers["x-prelude-adapter"] == "a0"
        assert raw.headers["x-prelude-revision"] == REVISION_ID
        assert len(raw.headers["x-request-id"]) == 32

        prefill, decode = cluster.prefill[0], cluster.decode[0]
        assert prefill.ensured == [REVISION_ID]
        (for_prefill,), (for_decode,) = prefill.engine.requests, decode.engine.requests
        assert for_prefill["lora_path"] == REVISION_ID
        assert for_prefill["extra_key"] == "default|"
        assert for_prefill["stream"] is False
        assert not {"lora_path", "extra_key", "adapter"} & set(for_decode)
        for name in ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "messages", "model"):
            assert for_prefill[name] == for_decode[name], name
        assert (for_decode["bootstrap_host"], for_decode["bootstrap_port"]) == ("10.0.0.1", 8998)
        assert 0 <= for_decode["bootstrap_room"] < 2**63
        assert answer.id == for_decode["rid"]

    async def test_stream(self, cluster: ClusterStandIn) -> None:
        stream = await cluster.client.chat.completions.create(
            model=f"{MODEL}:a0", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == TEXT
        assert chunks[-1].usage.completion_tokens == 3
        assert {chunk.model for chunk in chunks} == {f"{MODEL}:a0"}
        assert {chunk.system_fingerprint for chunk in chunks} == {f"{FINGERPRINT}-{REVISION_ID[7:19]}"}
        await cluster.is_idle()
        page = await cluster.metrics_page()
        assert 'prelude_router_requests_total{endpoint="chat",status="200"} 1.0' in page
        assert 'prelude_router_time_to_first_token_seconds_count{endpoint="chat"} 1.0' in page
        assert "stream_options" not in cluster.prefill[0].engine.requests[0]
        assert cluster.decode[0].engine.requests[0]["stream"] is True

    async def test_values_reach_both_engines_byte_for_byte(self, cluster: ClusterStandIn) -> None:
        values = {
            "prompt": r'"caf\u00e9 \ud83d\ude00 é"',
            "temperature": "0.1000000000000000055511151231257827",
            "logit_bias": '{ "5" : 1.50 }',
            "stop": r'[ "\u0041" ]',
        }
        given = ",".join(f'"{name}":{value}' for name, value in values.items())
        body = '{"model":"base","adapter":"a0","user":null,' + given
        headers = {"content-type": "application/json; charset=utf-8", "x-data-parallel-rank": "7"}
        url = f"{cluster.url}/v1/completions"
        async with cluster.http.post(url, data=body + "}", headers=headers) as response:
            assert response.status == 200
        for worker in cluster.workers:
            (sent,) = worker.engine.bodies
            for name, value in values.items():
                assert f'"{name}":{value}'.encode() in sent
            assert b'"user"' not in sent
            assert not any(name.lower().startswith("x-") for name in worker.engine.headers[0])

    async def test_base_model_needs_no_adapter(self, cluster: ClusterStandIn) -> None:
        status, answer, headers = await cluster.post(prompt="Hi")
        assert (status, answer["choices"][0]["text"]) == (200, TEXT)
        assert answer["system_fingerprint"] == FINGERPRINT
        assert not {"x-prelude-adapter", "x-prelude-revision"} & set(headers)
        assert cluster.prefill[0].ensured == []
        assert "lora_path" not in cluster.prefill[0].engine.requests[0]


class TestSeveralSequences:
    async def test_n_with_the_openai_client(self, cluster: ClusterStandIn) -> None:
        answer = await cluster.client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, seed=5, extra_body={"adapter": "a0"}
        )
        assert [(c.index, c.message.content) for c in answer.choices] == [(0, TEXT), (1, TEXT)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 6)
        assert answer.system_fingerprint == f"{FINGERPRINT}-{REVISION_ID[7:19]}"
        for worker in cluster.workers:
            requests = worker.engine.requests
            assert sorted(request["seed"] for request in requests) == [5, 6]
            assert len({request["bootstrap_room"] for request in requests}) == 2
            assert len({request["rid"] for request in requests}) == 2
            assert not any("n" in request for request in requests)

    @pytest.mark.parametrize("prompts", [["One", "Two"], [[1, 2], [3]]])
    async def test_stream_of_two_prompts_twice(self, prompts: list[Any], cluster: ClusterStandIn) -> None:
        cluster.decode[0].engine.event_gap_s = 0.01
        *events, done = await cluster.stream(prompt=prompts, n=2, stream_options={"include_usage": True})
        assert done == b"[DONE]"
        chunks = [json.loads(event) for event in events]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert len({chunk["created"] for chunk in chunks}) == 1
        texts: dict[int, str] = {}
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == dict.fromkeys(range(4), TEXT)
        assert chunks[-1]["choices"] == []
        assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (14, 12)
        sent = [request["prompt"] for request in cluster.decode[0].engine.requests]
        assert sorted(sent) == sorted(prompts * 2)

    async def test_one_failure_ends_all(self, cluster: ClusterStandIn) -> None:
        cluster.decode[0].engine.behaviours = [stops_after(1), answers(400)]
        events = await cluster.stream(prompt=["One", "Two"])
        assert json.loads(events[-1])["error"]["code"] == "invalid_request"
        await eventually(lambda: asyncio.sleep(0, len(set(cluster.decode[0].engine.aborted))), lambda n: n == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("debug_header", [False, True])
async def test_a_header_says_where_a_request_went_where_it_is_allowed(stream: bool, debug_header: bool) -> None:
    async with running_cluster(debug_header=debug_header) as cluster:
        url, body = f"{cluster.url}/v1/completions", {"model": MODEL, "prompt": "Hi", "adapter": "a0"}
        for asks in (True, False):
            headers = {"x-prelude-debug": "placement"} if asks else {}
            async with cluster.http.post(url, json={**body, "stream": stream}, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
                found = answer.headers.get("x-prelude-placement")
            assert found == ("p0>d0" if asks and debug_header else None)
