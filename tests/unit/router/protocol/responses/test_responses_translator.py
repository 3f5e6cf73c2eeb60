"""Answers of chats as responses. The official client's own types say what is documented."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.responses import Response as OpenaiResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from router.errors import BrokenAnswer, DeadlineExceeded, answer_of
from router.protocol.field_values import Limits
from router.protocol.responses.response import Response
from router.protocol.responses.translator import ResponseTranslator
from router.protocol.validation import Endpoint, validate

EVENT = TypeAdapter(ResponseStreamEvent)
USAGE = {
    "prompt_tokens": 7, "total_tokens": 10, "completion_tokens": 3, "reasoning_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip
DONE = b"data: [DONE]\n\n"


def wording(*, hides_cached_tokens: bool = False, **fields: Any) -> ResponseTranslator:
    body = json.dumps({"model": "base", "input": "Hi", **fields}).encode()
    form = validate(Endpoint.RESPONSES, body, Limits(8, 1000)).repeated
    response = Response(form, "0" * 32, model="base:a0", fingerprint="f00d-1")
    return ResponseTranslator(response, hides_cached_tokens=hides_cached_tokens)


def chunk(delta: dict[str, Any] | None = None, finish_reason: str | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def call(index: int, arguments: str, call_id: str | None = None, name: str | None = None) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}]}


def documented(events: bytes) -> list[dict[str, Any]]:
    """The events' data. Each is valid in the eyes of the official client, and they are numbered."""
    found = []
    for event in events.split(b"\n\n")[:-1]:
        kind, data = event.split(b"\n")
        value = json.loads(data.removeprefix(b"data: "))
        assert kind == b"event: " + value["type"].encode()
        assert EVENT.validate_python(value).type == value["type"]
        found.append(value)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def streamed(words: ResponseTranslator, chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    return documented(b"".join(words.on_events(each) for each in chunks))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


TEXT = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hello"}), chunk({"content": " world"})]


def test_a_text_as_events() -> None:
    end = [chunk({}, "stop"), chunk(usage=USAGE), DONE]
    events = streamed(wording(instructions="Be kind", metadata={"a": "b"}, temperature=0.5), TEXT + end)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    begun, last = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert events[2]["item"]["content"] == []
    assert [event["delta"] for event in events[4:6]] == ["Hello", " world"]
    assert events[6]["text"] == events[7]["part"]["text"] == "Hello world"
    assert last["output"] == [events[8]["item"]]
    assert len({event["item_id"] for event in events[3:8]} | {last["output"][0]["id"]}) == 1
    assert last["usage"] == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 10,
    }  # fmt: skip
    for response in (begun, last):
        assert response["id"] == "resp_" + "0" * 32
        assert response["model"] == "base:a0"
        assert response["system_fingerprint"] == "f00d-1"
        assert (response["store"], response["instructions"], response["metadata"]) == (False, "Be kind", {"a": "b"})
        assert (response["temperature"], response["top_p"], response["tools"]) == (0.5, None, [])


CASES: dict[str, tuple[dict[str, Any], list[bytes], str]] = {
    "text": ({"content": "Hello world"}, TEXT, "stop"),
    "nothing": ({"content": ""}, TEXT[:1], "stop"),
    "cut off": ({"content": "Hello world"}, TEXT, "length"),
    "reasoning": (
        {"content": "Hello world", "reasoning_content": "Hm."},
        [chunk({"reasoning_content": "H"}), chunk({"reasoning_content": "m."}), *TEXT],
        "stop",
    ),
    "reasoning cut off": (
        {"content": None, "reasoning_content": "Hm."}, [chunk({"reasoning_content": "Hm."})], "length",
    ),
    "calls": (
        {"content": "Hello world", "tool_calls": [
            {"id": "c1", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "index": 1, "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        [*TEXT, chunk(call(0, "", "c1", "f")), chunk(call(0, '{"a": ')), chunk(call(0, "1}")),
         chunk(call(1, "{}", "c2", "g"))],
        "tool_calls",
    ),
    "a call alone": (
        {"content": None, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]},
        [chunk({"role": "assistant", "content": ""}), chunk(call(0, "{}", "c1", "f"))],
        "tool_calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_stream_ends_with_the_whole_response(name: str) -> None:
    message, chunks, reason = CASES[name]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": USAGE}
    whole = json.loads(wording(tools=tools).on_answer(json.dumps(answer).encode()))
    chunks = [*chunks, chunk({}, reason), chunk(usage=USAGE), DONE]
    events = streamed(wording(tools=tools), chunks)
    in_one_piece = streamed(wording(tools=tools), [b"".join(chunks)])
    assert kinds(in_one_piece) == kinds(events)
    assert [each.get("delta") for each in in_one_piece] == [each.get("delta") for each in events]
    streamed_whole = {**events[-1]["response"], "created_at": whole["created_at"]}
    assert streamed_whole == whole
    assert OpenaiResponse.model_validate(whole).object == "response"
    status = "incomplete" if reason == "length" else "completed"
    assert (whole["status"], events[-1]["type"]) == (status, f"response.{status}")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if reason == "length" else None)
    statuses = [item["status"] for item in whole["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + [status]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed_whole["output"]
    for index, item in enumerate(done):  # what deltas say is what the item says at its end
        deltas = "".join(e["delta"] for e in events if e.get("output_index") == index and "delta" in e)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_the_events_of_calls() -> None:
    _, chunks, reason = CASES["calls"]
    events = streamed(wording(), [*chunks, chunk({}, reason), DONE])
    assert kinds(events)[9:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[9]["item"] | {"id": ""} == {
        "type": "function_call", "id": "", "call_id": "c1", "name": "f", "arguments": "", "status": "in_progress",
    }  # fmt: skip


def test_a_failure_is_an_event_with_what_was_there() -> None:
    words = wording()
    begun = b"".join(words.on_events(each) for each in TEXT)
    events = documented(begun + words.failed(answer_of(DeadlineExceeded("no event for 5 s"))))
    assert kinds(events)[-2:] == ["output_text.delta", "failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "no event for 5 s", "reason": "deadline_exceeded"}
    assert failed["output"][0]["status"] == "incomplete"
    assert failed["output"][0]["content"][0]["text"] == "Hello world"


def test_cached_tokens_of_a_shared_cache_are_hidden() -> None:
    answer = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}], "usage": USAGE}
    body = json.dumps(answer, separators=(",", ":")).encode()
    for hides, expected in ((True, 0), (False, 4)):
        whole = json.loads(wording(hides_cached_tokens=hides).on_answer(body))
        assert whole["usage"]["input_tokens_details"]["cached_tokens"] == expected


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b'{"choices":[{}]}', b'{"choices":[{"message":{"content":1}}]}'])
def test_an_answer_that_is_no_chats(answer: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        wording().on_answer(answer)


@pytest.mark.parametrize(
    "chunks",
    [
        [b"data: {\n\n"],
        [*TEXT, DONE],  # no reason why it ended
        [chunk(call(0, "", "c1", "f")), chunk(call(1, "", "c2", "g")), chunk(call(0, "{}"))],
    ],
)
def test_a_stream_that_is_no_chats(chunks: list[bytes]) -> None:
    words = wording()
    *before, last = chunks
    for each in before:
        words.on_events(each)
    with pytest.raises(BrokenAnswer):
        words.on_events(last)
