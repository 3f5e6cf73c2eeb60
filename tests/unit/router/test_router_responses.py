"""/v1/responses over real sockets, against stand-ins of engines, with the official client."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from support.router_stand_ins import (
    FINGERPRINT,
    MODEL,
    REVISION_ID,
    TEXT,
    ClusterStandIn,
    breaks_after,
    event_gap_timeout_s,
    running_cluster,
    stops_after,
)
from support.routers.keyed_cluster import keyed_cluster

from router.protocol.responses.fields import FIELDS

PATH = "/v1/responses"


async def events_of(cluster: ClusterStandIn, **fields: Any) -> list[dict[str, Any]]:
    """The data of each event of a stream."""
    asked = {"model": MODEL, "input": "Hi", "stream": True, **fields}
    async with cluster.http.post(f"{cluster.url}{PATH}", json=asked) as response:
        assert response.status == 200, await response.text()
        body = await response.read()
    assert body.endswith(b"}\n\n")  # without [DONE], as OpenAI has it
    return [json.loads(event.partition(b"data: ")[2]) for event in body.split(b"\n\n")[:-1]]


async def test_a_whole_response(cluster: ClusterStandIn) -> None:
    raw = await cluster.client.responses.with_raw_response.create(
        model=MODEL, instructions="Be kind", input="Hi", max_output_tokens=9, extra_body={"adapter": "a0"}
    )
    answer = raw.parse()
    assert (answer.status, answer.output_text, answer.model) == ("completed", TEXT, MODEL)
    assert answer.id == f"resp_{raw.headers['x-request-id']}"
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 3, 10)
    assert (answer.store, answer.max_output_tokens, answer.instructions) == (False, 9, "Be kind")
    assert answer.system_fingerprint == f"{FINGERPRINT}-{REVISION_ID[7:19]}"
    assert raw.headers["x-prelude-adapter"] == "a0"
    assert raw.headers["x-prelude-revision"] == REVISION_ID
    (for_prefill,), (for_decode,) = (worker.engine.requests for worker in cluster.workers)
    assert for_prefill["lora_path"] == REVISION_ID
    assert "lora_path" not in for_decode
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    for asked in (for_prefill, for_decode):
        assert asked["messages"] == messages
        assert asked["max_completion_tokens"] == 9
        assert not {"input", "instructions", "store", "max_output_tokens"} & asked.keys()


@pytest.mark.parametrize("unified", [False, True])
async def test_a_stream_is_the_whole_response(unified: bool) -> None:
    async with running_cluster(*((0, 0, 1) if unified else (1, 1))) as cluster:
        events = await events_of(cluster, adapter="a0")
        _, whole, _ = await cluster.post(PATH, input="Hi", adapter="a0")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events][:2] == ["response.created", "response.in_progress"]
        assert "".join(event.get("delta", "") for event in events) == TEXT
        last = events[-1]
        assert last["type"] == "response.completed"
        same = {"id": "", "created_at": 0, "output": []}
        assert {**last["response"], **same} == {**whole, **same}
        assert last["response"]["output"][0]["content"] == whole["output"][0]["content"]


@pytest.mark.parametrize(("failure", "code"), [(breaks_after(2), "worker_lost"), (stops_after(2), "deadline_exceeded")])
async def test_a_failure_in_the_middle_is_the_last_event(failure: Any, code: str) -> None:
    async with running_cluster(event_gap_timeout_s=event_gap_timeout_s(code)) as cluster:
        cluster.decode[0].engine.behaviours = [failure]
        events = await events_of(cluster)
        assert [event["type"] for event in events].count("response.failed") == 1
        last = events[-1]
        assert (last["type"], last["sequence_number"]) == ("response.failed", len(events) - 1)
        failed = last["response"]
        assert failed["status"] == "failed"
        assert (failed["error"]["code"], failed["error"]["reason"]) == ("server_error", code)
        assert failed["output"][0]["content"][0]["text"] == "Hello"
        await cluster.is_idle()
        page = await cluster.metrics_page()
        assert f'prelude_router_stream_errors_total{{code="{code}",endpoint="responses"}} 1.0' in page


async def test_requests_and_their_events_are_counted_as_those_of_chats(cluster: ClusterStandIn) -> None:
    await events_of(cluster)
    await cluster.post(PATH, input="Hi", store=True)
    await cluster.is_idle()
    page = await cluster.metrics_page()
    assert 'prelude_router_requests_total{endpoint="responses",status="200"} 1.0' in page
    assert 'prelude_router_requests_total{endpoint="responses",status="400"} 1.0' in page
    assert 'prelude_router_time_to_first_token_seconds_count{endpoint="responses"} 1.0' in page


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_quotas_count_the_tokens_that_engines_count(tmp_path: Path, stream: bool) -> None:
    """A stand-in counts 7 tokens of the prompt and 3 of the answer."""
    quotas = {"default": {}, "tenants": {"acme": {"output_tokens_per_min": 1_000}}}
    async with keyed_cluster(tmp_path, quotas=quotas) as keyed:
        key, cluster = await keyed.key("acme"), keyed.cluster
        asked, headers = (
            {"model": MODEL, "input": "Hi", "max_output_tokens": 900, "stream": stream},
            {"authorization": f"Bearer {key}"},
        )
        async with cluster.http.post(f"{cluster.url}{PATH}", json=asked, headers=headers) as response:
            assert response.status == 200
            assert response.headers["x-ratelimit-remaining-tokens"] == "100"  # 900 are reserved
            await response.read()
        await cluster.is_idle()
        page = await cluster.metrics_page()
        assert 'prelude_router_tenant_tokens_total{kind="prompt",tenant="acme"} 7.0' in page
        assert 'prelude_router_tenant_tokens_total{kind="output",tenant="acme"} 3.0' in page


async def test_what_is_stored_elsewhere_is_not_here() -> None:
    async with running_cluster(0, 0) as cluster:
        responses = cluster.client.responses
        for ask in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="responses are not stored"):
                await ask("resp_1")
        for fields in ({"previous_response_id": "resp_1"}, {"store": True}, {"tools": [{"type": "web_search"}]}):
            (name,) = fields
            with pytest.raises(openai.BadRequestError, match=name):
                await responses.create(model=MODEL, input="Hi", **fields)  # type: ignore[call-overload]
        status, answer = await cluster.get(PATH)
        assert (status, answer["error"]["code"]) == (405, "wrong_method")


def test_the_page_names_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    section = page.split("\n## Responses\n")[1].split("\n## ")[0]
    for name in FIELDS:
        assert f"`{name}`" in section, name
