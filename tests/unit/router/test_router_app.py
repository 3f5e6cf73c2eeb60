"""The whole router over real sockets, against stand-ins of engines and agents.

This proves how the router behaves, in particular when workers fail; see router_stand_ins for what it does not prove.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import openai
import pytest
from support.router_stand_ins import (
    FINGERPRINT,
    MODEL,
    REVISION_ID,
    ClusterStandIn,
    after,
    answers,
    breaks_after,
    drops,
    eventually,
    hangs,
    running_cluster,
    stops_after,
    streams,
)

from adapters.errors import AdapterError, AdapterIncompatible
from adapters.store.errors import StoreFull, StoreUnavailable
from router.fleet import worker_link

TEXT = "Hello wide world"
MESSAGES = [{"role": "user", "content": "Hi"}]
EVENT = b'data: {"id":"x","object":"text_completion","created":1,"model":"base","choices":[]}\n\n'


def client_of(cluster: ClusterStandIn) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


class TestOneSequence:
    def test_chat_with_an_adapter(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                completions = client_of(cluster).chat.completions.with_raw_response
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

        asyncio.run(scenario())

    def test_stream(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                stream = await client_of(cluster).chat.completions.create(
                    model=f"{MODEL}:a0", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                assert text == TEXT
                assert chunks[-1].usage.completion_tokens == 3
                assert {chunk.model for chunk in chunks} == {f"{MODEL}:a0"}
                assert {chunk.system_fingerprint for chunk in chunks} == {f"{FINGERPRINT}-{REVISION_ID[7:19]}"}
                await eventually(lambda: cluster.admin("/debug/requests"), lambda page: page[1] == {"requests": []})
                async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
                    page = await response.text()
                assert 'prelude_router_requests_total{endpoint="chat",status="200"} 1.0' in page
                assert 'prelude_router_time_to_first_token_seconds_count{endpoint="chat"} 1.0' in page
                assert "stream_options" not in cluster.prefill[0].engine.requests[0]
                assert cluster.decode[0].engine.requests[0]["stream"] is True

        asyncio.run(scenario())

    def test_values_reach_both_engines_byte_for_byte(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                values = {
                    "prompt": r'"caf\u00e9 \ud83d\ude00 é"',
                    "temperature": "0.1000000000000000055511151231257827",
                    "logit_bias": '{ "5" : 1.50 }',
                    "stop": r'[ "\u0041" ]',
                }
                body = '{"model":"base","adapter":"a0","user":null,' + ",".join(
                    f'"{name}":{value}' for name, value in values.items()
                )
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

        asyncio.run(scenario())

    def test_base_model_needs_no_adapter(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                status, answer, headers = await cluster.post(prompt="Hi")
                assert (status, answer["choices"][0]["text"]) == (200, TEXT)
                assert answer["system_fingerprint"] == FINGERPRINT
                assert not {"x-prelude-adapter", "x-prelude-revision"} & set(headers)
                assert cluster.prefill[0].ensured == []
                assert "lora_path" not in cluster.prefill[0].engine.requests[0]

        asyncio.run(scenario())

    def test_requests_spread_over_workers(self) -> None:
        async def scenario() -> None:
            async with running_cluster(2, 2) as cluster:
                for worker in cluster.decode:
                    worker.engine.behaviours = [after(0.2)] * 4
                await asyncio.gather(*(cluster.post(prompt="Hi") for _ in range(4)))
                assert [len(worker.engine.bodies) for worker in cluster.workers] == [2, 2, 2, 2]

        asyncio.run(scenario())

    def test_prompt_logprobs_come_from_prefill(self) -> None:
        def logprobs(*tokens: str) -> dict[str, Any]:
            values = [None if token == "<s>" else -0.5 for token in tokens]
            return {
                "tokens": list(tokens),
                "token_logprobs": values,
                "top_logprobs": [None if value is None else {"x": value} for value in values],
                "text_offset": [-1] * len(tokens),
            }

        async def scenario() -> None:
            async with running_cluster() as cluster:
                prefill, decode = cluster.prefill[0].engine, cluster.decode[0].engine

                async def prefill_answer(engine: Any, fields: Any, request: Any) -> Any:
                    body = engine.answer(fields, logprobs=logprobs("<s>", "Hi", "Hello"))
                    return await answers(200, body)(engine, fields, request)

                async def decode_answer(engine: Any, fields: Any, request: Any) -> Any:
                    body = engine.answer(fields, logprobs=logprobs("Hello", " wide", " world"))
                    return await answers(200, body)(engine, fields, request)

                prefill.behaviours, decode.behaviours = [after(0.1), prefill_answer], [decode_answer] * 2
                prefill.behaviours.pop(0)
                status, answer, _ = await cluster.post(prompt="Hi", echo=True, logprobs=1, adapter="a0")
                assert status == 200
                assert answer["choices"][0]["logprobs"] == logprobs("<s>", "Hi", "Hello", " wide", " world")

        asyncio.run(scenario())

    def test_large_body(self) -> None:
        async def scenario() -> None:
            async with running_cluster(limits={"prompt_bytes_per_token": 64}) as cluster:
                prompt = "word " * 1_000_000
                assert (await cluster.post(prompt=prompt))[0] == 200
                assert cluster.decode[0].engine.requests[0]["prompt"] == prompt

        asyncio.run(scenario())

    def test_slow_prefill_answer_does_not_hold_the_client(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.prefill[0].engine.behaviours = [after(0.4)]  # its KV is there, its answer is not
                events = await asyncio.wait_for(cluster.stream(prompt="Hi"), 0.3)
                assert events[-1] == b"[DONE]"
                await eventually(lambda: cluster.admin("/debug/requests"), lambda page: page[1] == {"requests": []})
                assert cluster.prefill[0].engine.aborted == []

        asyncio.run(scenario())


class TestSeveralSequences:
    def test_n_with_the_openai_client(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                answer = await client_of(cluster).chat.completions.create(
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

        asyncio.run(scenario())

    @pytest.mark.parametrize("prompts", [["One", "Two"], [[1, 2], [3]]])
    def test_stream_of_two_prompts_twice(self, prompts: list[Any]) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
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

        asyncio.run(scenario())

    def test_one_failure_ends_all(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.decode[0].engine.behaviours = [stops_after(1), answers(400)]
                events = await cluster.stream(prompt=["One", "Two"])
                assert json.loads(events[-1])["error"]["code"] == "invalid_request"
                await eventually(lambda: asyncio.sleep(0, len(set(cluster.decode[0].engine.aborted))), lambda n: n == 1)

        asyncio.run(scenario())


class TestFailuresBeforeTheFirstEvent:
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize("failure", [drops, answers(500), answers(503)])
    @pytest.mark.parametrize("stream", [False, True])
    def test_another_pair_answers(self, role: str, failure: Any, stream: bool) -> None:
        async def scenario() -> None:
            async with running_cluster(2, 2) as cluster:
                failing = (cluster.prefill if role == "prefill" else cluster.decode)[0]
                other = (cluster.decode if role == "prefill" else cluster.prefill)[0]
                failing.engine.behaviours = [failure]
                other.engine.behaviours = [hangs]  # its counterpart never arrives
                if stream:
                    assert (await cluster.stream(prompt="Hi"))[-1] == b"[DONE]"
                else:
                    assert (await cluster.post(prompt="Hi"))[0] == 200
                assert len(failing.engine.bodies) == 1
                # the surviving call of the failed attempt is aborted
                rid = other.engine.requests[0]["rid"]
                await eventually(
                    lambda: asyncio.sleep(0, list(other.engine.aborted)), lambda aborted: rid in aborted, 2
                )
                retried = [request["rid"] for worker in cluster.workers for request in worker.engine.requests]
                assert not any(r != rid and r.startswith(rid) for r in retried)

        asyncio.run(scenario())

    def test_dead_worker_without_another(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.decode[0].engine.behaviours = [drops]
                cluster.prefill[0].engine.behaviours = [hangs]
                status, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["code"]) == (502, "worker_lost")
                assert answer["error"]["type"] == "server_error"
                assert headers["retry-after"] == "1"
                assert headers["x-prelude-revision"] == REVISION_ID
                assert (await cluster.post(prompt="Hi"))[0] == 200  # and the next request is served

        asyncio.run(scenario())

    def test_refused_connection_is_retried(self) -> None:
        async def scenario() -> None:
            async with running_cluster(1, 2) as cluster:
                await cluster.decode[0].engine.stop()  # its agent has not noticed
                cluster.prefill[0].engine.behaviours = [hangs]
                assert (await cluster.post(prompt="Hi"))[0] == 200

        asyncio.run(scenario())

    def test_agent_reports_a_dead_engine_before_tcp_does(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.prefill[0].engine.behaviours = [hangs]
                cluster.decode[0].engine.behaviours = [after(60)]
                asking = asyncio.create_task(cluster.post(prompt="Hi"))
                await eventually(lambda: asyncio.sleep(0, cluster.decode[0].engine.num_running), bool)
                await cluster.decode[0].change(incarnation="d0-2")
                status, answer, _ = await asyncio.wait_for(asking, 30)
                assert (status, answer["error"]["code"]) == (502, "worker_lost")

        asyncio.run(scenario())

    def test_wrong_request_is_not_retried(self) -> None:
        message = "The input (9 tokens) is longer than the model's context length (8 tokens)."
        error = {"object": "error", "message": message, "type": "BadRequest"}
        error |= {"param": None, "code": 400}

        async def scenario() -> None:
            async with running_cluster(2, 2) as cluster:
                cluster.prefill[0].engine.behaviours = [answers(400, error)]
                cluster.decode[0].engine.behaviours = [hangs]
                status, answer, _ = await cluster.post(prompt="Hi", stream=True)
                assert status == 400
                assert answer["error"]["message"] == message
                assert answer["error"]["type"] == "invalid_request_error"
                assert answer["error"]["code"] == "context_length_exceeded"
                assert [len(worker.engine.bodies) for worker in cluster.workers] == [1, 0, 1, 0]

        asyncio.run(scenario())

    def test_aborts_inside_a_200_count_as_failures(self) -> None:
        error = (
            b'data: {"error": {"object": "error", "message": "KV transfer", "type": "x", "param": null, "code": 500}}'
        )

        async def scenario() -> None:
            async with running_cluster(1, 2) as cluster:
                cluster.decode[0].engine.behaviours = [streams(error + b"\n\n", b"data: [DONE]\n\n")]
                assert (await cluster.stream(prompt="Hi"))[-1] == b"[DONE]"
                assert len(cluster.decode[1].engine.bodies) == 1

                async def gives_up(engine: Any, fields: Any, request: Any) -> Any:
                    return await answers(200, engine.answer(fields, finish_reason="abort"))(engine, fields, request)

                cluster.prefill[0].engine.behaviours = [gives_up]
                cluster.decode[0].engine.behaviours = [hangs]
                assert (await cluster.post(prompt="Hi"))[0] == 200

        asyncio.run(scenario())

    def test_nothing_in_time(self) -> None:
        async def scenario() -> None:
            async with running_cluster(first_event_timeout_s=0.3) as cluster:
                for worker in cluster.workers:
                    worker.engine.behaviours = [hangs]
                status, answer, _ = await cluster.post(prompt="Hi", stream=True)
                assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
                for worker in cluster.workers:
                    rid = worker.engine.requests[0]["rid"]
                    await eventually(lambda w=worker: asyncio.sleep(0, w.engine.aborted), lambda a, r=rid: r in a, 2)

        asyncio.run(scenario())

    @pytest.mark.slow
    def test_long_answer_has_its_own_deadline(self) -> None:
        async def scenario() -> None:
            async with running_cluster(first_event_timeout_s=0.3, answer_timeout_s=1.0) as cluster:
                cluster.decode[0].engine.behaviours = [after(0.6), after(5)]
                assert (await cluster.post(prompt="Hi"))[0] == 200
                status, answer, _ = await cluster.post(prompt="Hi")
                assert (status, answer["error"]["message"]) == (504, "the answer did not come in time")

        asyncio.run(scenario())

    def test_no_pair(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                await cluster.decode[0].change(draining=True)
                await cluster.is_ready(False)
                status, answer, headers = await cluster.post(prompt="Hi")
                assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_worker_available", "1")
                assert (await cluster.get("/health"))[0] == 200
                _, page = await cluster.admin("/ready")
                assert page["workers"]["d0"]["reason"] == "draining"

        asyncio.run(scenario())

    def test_restarted_decode_needs_warming(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                await cluster.decode[0].change(incarnation="d0-2")
                await cluster.is_ready(False)
                await cluster.warm()
                await cluster.is_ready()

        asyncio.run(scenario())

    def test_silent_worker_gets_nothing(self) -> None:
        async def scenario() -> None:
            async with running_cluster(heartbeat_s=0.1) as cluster:
                cluster.decode[0].sends_states.clear()
                await cluster.is_ready(False)
                cluster.decode[0].sends_states.set()
                await cluster.is_ready()

        asyncio.run(scenario())


class TestAdapters:
    def test_refused_adapter_says_why(self) -> None:
        async def scenario() -> None:
            async with running_cluster(2, 1) as cluster:
                cluster.prefill_by_affinity[0].ensure_errors = [AdapterIncompatible("rank 512 is over 64")]
                status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["message"]) == (422, "rank 512 is over 64")
                assert answer["error"]["code"] == "adapter_incompatible"
                assert not any(worker.engine.bodies for worker in cluster.workers)

        asyncio.run(scenario())

    @pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
    def test_busy_worker_is_left_for_another(self, code: grpc.StatusCode) -> None:
        async def scenario() -> None:
            async with running_cluster(2, 1) as cluster:
                first, second = cluster.prefill_by_affinity
                first.ensure_errors = [code]
                assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
                assert [len(first.engine.bodies), len(second.engine.bodies)] == [0, 1]

        asyncio.run(scenario())

    def test_workers_that_are_all_busy_say_when_to_try_again(self) -> None:
        async def scenario() -> None:
            async with running_cluster(2, 1) as cluster:
                for worker in cluster.prefill:
                    worker.ensure_errors, worker.retry_after_s = [grpc.StatusCode.RESOURCE_EXHAUSTED], 6.2
                status, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "adapter_unavailable", "7")
                assert [len(worker.ensured) for worker in cluster.prefill] == [1, 1]
                assert not any(worker.engine.bodies for worker in cluster.workers)
                assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200

        asyncio.run(scenario())

    @pytest.mark.parametrize("error", [StoreUnavailable("no bucket"), StoreFull("no room")])
    def test_a_workers_own_trouble_is_tried_elsewhere(self, error: AdapterError) -> None:
        async def scenario() -> None:
            async with running_cluster(2, 1) as cluster:
                first, second = cluster.prefill_by_affinity
                first.ensure_errors = [error]
                assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
                assert [len(first.engine.bodies), len(second.engine.bodies)] == [0, 1]
                first.ensure_errors, second.ensure_errors = [error], [error]
                status, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["code"]) == (error.http_status, error.code)
                assert headers["retry-after"] == "1"

        asyncio.run(scenario())

    @pytest.mark.parametrize("keeps_deadlines", [True, False])
    def test_slow_load_has_a_deadline(self, keeps_deadlines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_link, "ANSWER_MARGIN_S", 0.2)

        async def scenario() -> None:
            async with running_cluster(adapter_timeout_s=0.2) as cluster:
                (worker,) = cluster.prefill
                worker.ensure_delay_s, worker.keeps_deadlines = 60, keeps_deadlines
                began = time.monotonic()
                status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
                assert time.monotonic() - began < 30

        asyncio.run(scenario())

    def test_at_the_deadline_the_worker_says_what_was_in_the_way(self) -> None:
        async def scenario() -> None:
            async with running_cluster(adapter_timeout_s=0.2) as cluster:
                (worker,) = cluster.prefill
                worker.ensure_delay_s, worker.ensure_errors = 3, [StoreUnavailable("s3://bucket does not answer")]
                status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["code"]) == (503, "adapter_store_unavailable")

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        "message",
        [
            "The following requested LoRA adapters are not loaded: sha256:ab\nLoaded adapters: dict_keys(['s3cret']).",
            "Got LoRA adapter that has never been loaded: sha256:ab\nAll loaded adapters: dict_keys(['s3cret']).",
        ],
    )
    def test_evicted_between_load_and_use(self, message: str) -> None:
        error = {"object": "error", "message": message, "type": "424", "param": None, "code": 424}

        async def scenario() -> None:
            async with running_cluster() as cluster:
                prefill, decode = cluster.prefill[0], cluster.decode[0]
                prefill.engine.behaviours, decode.engine.behaviours = [answers(424, error)], [hangs]
                assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
                assert prefill.not_in_engine == [False, True]  # else a worker that thinks it has it does nothing
                prefill.engine.behaviours, decode.engine.behaviours = [answers(424, error)] * 3, [hangs] * 3
                status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
                assert (status, answer["error"]["code"]) == (503, "adapter_not_resident")
                assert "s3cret" not in json.dumps(answer)

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("fields", "status", "code"),
        [
            ({"adapter": "a9"}, 404, "adapter_not_found"),
            ({"adapter": "broken"}, 422, "adapter_malformed"),
            ({"model": "broken"}, 422, "adapter_malformed"),
            ({"model": "a9"}, 404, "model_not_found"),
            ({"model": "base:a9"}, 404, "adapter_not_found"),
            ({"model": "base:a0", "adapter": "a1"}, 400, "conflicting_adapters"),
        ],
    )
    def test_wrong_references(self, fields: dict[str, Any], status: int, code: str) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                answer_status, answer, _ = await cluster.post(prompt="Hi", **fields)
                assert (answer_status, answer["error"]["code"]) == (status, code)
                assert not cluster.prefill[0].engine.bodies

        asyncio.run(scenario())


class TestFailuresAfterTheFirstEvent:
    @pytest.mark.parametrize(
        ("failure", "code"),
        [
            (breaks_after(2), "worker_lost"),
            (stops_after(2), "deadline_exceeded"),
            (streams(EVENT), "broken_answer"),
            (streams(EVENT, b'data: {"error": {"code": 500}}\n\n'), "engine_failure"),
        ],
    )
    def test_stream_ends_with_an_error_event(self, failure: Any, code: str) -> None:
        async def scenario() -> None:
            async with running_cluster(event_gap_timeout_s=0.5) as cluster:
                cluster.decode[0].engine.behaviours = [failure]
                events = await cluster.stream(prompt="Hi")
                assert len(events) >= 2
                error = json.loads(events[-1])["error"]
                assert (error["code"], error["type"]) == (code, "server_error")

        asyncio.run(scenario())

    def test_openai_client_raises(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.decode[0].engine.behaviours = [breaks_after(2)]
                stream = await client_of(cluster).completions.create(model=MODEL, prompt="Hi", stream=True)
                texts = []

                async def read() -> None:
                    async for chunk in stream:
                        texts.append(chunk.choices[0].text)

                with pytest.raises(openai.APIError, match="broke"):
                    await read()
                assert texts == ["Hello", " wide"]

        asyncio.run(scenario())

    def test_engine_death_reported_by_the_agent(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                decode = cluster.decode[0]
                decode.engine.behaviours = [stops_after(1)]
                streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
                await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("relaying"))
                await decode.change(engine_state=3, ready=False, incarnation="")
                events = await asyncio.wait_for(streaming, 30)
                assert json.loads(events[-1])["error"]["code"] == "worker_lost"

        asyncio.run(scenario())

    def test_prefill_may_die_once_decode_speaks(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.decode[0].engine.event_gap_s = 0.1
                streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
                await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("relaying"))
                await cluster.prefill[0].crash_engine()
                assert (await streaming)[-1] == b"[DONE]"

        asyncio.run(scenario())

    def test_silent_agent_does_not_stop_a_stream(self) -> None:
        async def scenario() -> None:
            async with running_cluster(heartbeat_s=0.05) as cluster:
                cluster.decode[0].engine.event_gap_s = 0.2
                streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
                await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("relaying"))
                cluster.decode[0].sends_states.clear()
                assert (await streaming)[-1] == b"[DONE]"
                assert (await cluster.get("/ready"))[0] == 503

        asyncio.run(scenario())


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    def test_both_engines_abort(self, stream: bool) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.prefill[0].engine.behaviours = [hangs]
                cluster.decode[0].engine.behaviours = [stops_after(2) if stream else hangs]
                asking = asyncio.create_task(cluster.post(prompt="Hi", stream=stream))
                has_phase = _has_phase("relaying" if stream else "waiting_first_event")
                await eventually(lambda: cluster.admin("/debug/requests"), has_phase)
                await eventually(lambda: asyncio.sleep(0, [w.engine.num_running for w in cluster.workers]), all)
                asking.cancel()
                for worker in cluster.workers:
                    rid = worker.engine.requests[0]["rid"]
                    await eventually(lambda w=worker: asyncio.sleep(0, w.engine.aborted), lambda a, r=rid: r in a, 2)
                    await eventually(lambda w=worker: asyncio.sleep(0, w.engine.num_running), lambda n: n == 0, 2)
                await eventually(lambda: cluster.admin("/debug/requests"), lambda page: page[1] == {"requests": []}, 2)
                async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
                    page = await response.text()
                assert 'prelude_router_requests_total{endpoint="completions",status="499"} 1.0' in page
                assert 'prelude_router_worker_legs_in_flight{worker="d0"} 0.0' in page

        asyncio.run(scenario())

    def test_while_prefills_last_word_is_awaited(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.prefill[0].engine.behaviours = [hangs]  # decode's answer is complete before prefill's
                asking = asyncio.create_task(cluster.post(prompt="Hi"))
                await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("done"))
                asking.cancel()
                await eventually(lambda: cluster.admin("/debug/requests"), _is_empty, 0.5)
                await eventually(lambda: asyncio.sleep(0, cluster.prefill[0].engine.aborted), bool, 0.5)
                async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
                    page = await response.text()
                for worker in ("p0", "d0"):
                    assert f'prelude_router_worker_legs_in_flight{{worker="{worker}"}} 0.0' in page

        asyncio.run(scenario())

    def test_client_that_does_not_read(self) -> None:
        async def scenario() -> None:
            async with running_cluster(event_gap_timeout_s=0.5) as cluster:
                cluster.decode[0].engine.words = ("x" * 100_000,) * 200
                host, port = cluster.url.removeprefix("http://").split(":")
                _, writer = await asyncio.open_connection(host, int(port), limit=1024)
                body = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True}).encode()
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
                await eventually(lambda: asyncio.sleep(0, len(cluster.decode[0].engine.aborted)), bool)
                writer.close()

        asyncio.run(scenario())


class TestBadInput:
    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            (b"{", 400, "invalid_body"),
            (b"[]", 400, "invalid_body"),
            (b'{"model": "base", "prompt": "\xff"}', 400, "invalid_body"),
            (b'{"model": "base", "prompt": "Hi", "temperature": NaN}', 400, "invalid_body"),
            (b'{"model": "base", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "invalid_body"),
            (b'{"model": "base", "prompt": "Hi", "lora_path": "x"}', 400, "refused_field"),
            (b'{"model": 1, "prompt": "Hi"}', 400, "invalid_field"),
            (b'{"model": "base", "prompt": "' + b"x" * 5000 + b'"}', 413, "body_too_large"),
        ],
    )
    def test_bodies(self, body: bytes, status: int, code: str) -> None:
        async def scenario() -> None:
            async with running_cluster(max_body_bytes=1024 if status == 413 else 65536) as cluster:
                async with cluster.http.post(
                    f"{cluster.url}/v1/completions", data=body, headers={"content-type": "application/json"}
                ) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"]) == (status, code)
                    assert error["type"] == "invalid_request_error"
                    assert set(error) == {"message", "type", "param", "code"}
                    assert "x-request-id" in response.headers
                assert not cluster.prefill[0].engine.bodies
                assert (await cluster.post(prompt="Hi"))[0] == 200

        asyncio.run(scenario())

    def test_undeclared_size(self) -> None:
        async def chunks() -> Any:
            for _ in range(10):
                yield b"x" * 500

        async def scenario() -> None:
            async with running_cluster(max_body_bytes=1024) as cluster:
                headers = {"content-type": "application/json"}
                async with cluster.http.post(
                    f"{cluster.url}/v1/completions", data=chunks(), headers=headers
                ) as response:
                    assert response.status == 413

        asyncio.run(scenario())

    def test_slow_body(self) -> None:
        async def chunks() -> Any:
            yield b"{"
            await asyncio.sleep(5)

        async def scenario() -> None:
            async with running_cluster(body_timeout_s=0.2) as cluster:
                headers = {"content-type": "application/json"}
                async with cluster.http.post(
                    f"{cluster.url}/v1/completions", data=chunks(), headers=headers
                ) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (408, "body_too_slow")

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("method", "path", "headers", "status", "code"),
        [
            ("POST", "/v1/nothing", {}, 404, "unknown_path"),
            ("GET", "/v1/completions", {}, 405, "wrong_method"),
            ("POST", "/v1/models", {}, 405, "wrong_method"),
            ("GET", "/v1/models/a9", {}, 404, "model_not_found"),
            ("POST", "/v1/completions", {"content-type": "text/plain"}, 400, "invalid_body"),
            ("POST", "/v1/completions", {"content-encoding": "br"}, 400, "invalid_body"),
        ],
    )
    def test_requests(self, method: str, path: str, headers: dict[str, str], status: int, code: str) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                headers_sent = {"content-type": "application/json", **headers}
                async with cluster.http.request(
                    method, cluster.url + path, data=b"{}" if method == "POST" else None, headers=headers_sent
                ) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (status, code)
                    assert "x-request-id" in response.headers

        asyncio.run(scenario())

    def test_engine_validation_text_is_made_readable(self) -> None:
        dump = (
            "1 validation error:\n  {'type': 'float_parsing', 'loc': ('body', 'top_p'), "
            "'msg': 'Input should be a valid number, unable to parse string as a number', 'input': 'hot'}\n\n"
            "  Endpoint: POST /v1/completions [{'type': 'float_parsing', 'loc': ('body', 'top_p'), ...}]"
        )
        error = {"object": "error", "message": dump, "type": "Bad Request", "param": None, "code": 400}

        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.prefill[0].engine.behaviours = [answers(400, error)]
                cluster.decode[0].engine.behaviours = [answers(400, error)]
                status, answer, _ = await cluster.post(prompt="Hi", top_p=0.5)
                assert status == 400
                assert answer["error"]["param"] == "top_p"
                assert answer["error"]["message"] == (
                    "top_p: Input should be a valid number, unable to parse string as a number"
                )

        asyncio.run(scenario())


class TestPages:
    def test_models(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                client = client_of(cluster)
                models = {model.id: model.model_dump() async for model in client.models.list()}
                assert set(models) == {MODEL, "a0"}  # the broken adapter is not offered
                assert (models["a0"]["parent"], models["a0"]["root"]) == (MODEL, REVISION_ID)
                assert models[MODEL]["parent"] is None
                assert (await client.models.retrieve(MODEL)).id == MODEL
                assert (await client.models.retrieve("base:a0")).id == "base:a0"
                with pytest.raises(openai.NotFoundError):
                    await client.models.retrieve("a9")

        asyncio.run(scenario())

    def test_debug_requests_shows_no_prompt(self) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                cluster.prefill[0].ensure_delay_s = 0.5
                asking = asyncio.create_task(cluster.post(prompt="s3cret", adapter="a0"))
                _, page = await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("ensuring_adapter"))
                (request,) = page["requests"]
                assert (request["adapter"], request["revision"]) == ("a0", REVISION_ID)
                assert (request["sequences"][0]["prefill"], request["sequences"][0]["decode"]) == ("p0", "d0")
                assert "s3cret" not in json.dumps(page)
                await asking

        asyncio.run(scenario())

    def test_one_log_line_per_request(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario() -> None:
            async with running_cluster() as cluster:
                headers = {"x-request-id": "mine-1", "authorization": "Bearer s3cret"}
                body = {"model": "a0", "prompt": "s3cret"}
                async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response:
                    request_id = response.headers["x-request-id"]
                    assert response.status == 200
                await eventually(lambda: cluster.admin("/debug/requests"), lambda page: page[1] == {"requests": []})
                (line,) = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
                assert line["request_id"] == request_id
                assert line["client_request_id"] == "mine-1"
                assert (line["adapter"], line["revision"], line["placements"]) == ("a0", REVISION_ID, ["p0>d0"])
                assert (line["status"], line["completion_tokens"]) == (200, 3)
                assert not any("s3cret" in str(record.__dict__) for record in caplog.records)

        with caplog.at_level("INFO"):
            asyncio.run(scenario())


class TestStopping:
    def test_running_streams_finish(self) -> None:
        async def scenario() -> None:
            async with running_cluster(drain_timeout_s=5) as cluster:
                cluster.decode[0].engine.event_gap_s = 0.1
                streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
                await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("relaying"))
                cluster.server.should_exit = True
                assert (await streaming)[-1] == b"[DONE]"

        asyncio.run(scenario())

    def test_streams_that_take_too_long_end_with_an_error(self) -> None:
        async def scenario() -> None:
            async with running_cluster(drain_timeout_s=0.3) as cluster:
                cluster.decode[0].engine.behaviours = [stops_after(2)]
                streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
                await eventually(lambda: cluster.admin("/debug/requests"), _has_phase("relaying"))
                cluster.server.should_exit = True
                events = await asyncio.wait_for(streaming, 30)
                assert json.loads(events[-1])["error"]["code"] == "router_stopping"
                await eventually(lambda: asyncio.sleep(0, len(cluster.decode[0].engine.aborted)), bool)

        asyncio.run(scenario())


def _has_phase(phase: str) -> Any:
    return lambda answer: any(s["phase"] == phase for r in answer[1]["requests"] for s in r["sequences"])


def _is_empty(answer: tuple[int, Any]) -> bool:
    return answer[1] == {"requests": []}
