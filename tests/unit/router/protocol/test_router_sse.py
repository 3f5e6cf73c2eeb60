"""Relay: bytes arrive however they like, whole events leave, two insertions and nothing else."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.sse import (
    DONE,
    FAILURE_WORDS,
    USAGE_END,
    AnswerRewriter,
    EventSplitter,
    error_in,
    is_aborted,
    take_usage,
)

EVENT = b'data: {"id":"r","object":"c","model":"base","choices":[{"text":%b,"finish_reason":null}]}\n\n'
NASTY = (
    'data: {"id":"model":"base" "function":{"name":null,{"id":null,"index":{"error": "finish_reason":"abort"\n\n [DONE]'
)

texts = st.one_of(st.text(max_size=40), st.just(NASTY))


def events_of(contents: list[str]) -> list[bytes]:
    return [EVENT % json.dumps(content, ensure_ascii=False).encode() for content in contents]


@given(st.lists(texts, min_size=1, max_size=6), st.lists(st.integers(0, 2000), max_size=12))
def test_any_cut_gives_the_same_events(contents: list[str], cuts: list[int]) -> None:
    data = b"".join(events_of(contents)) + DONE
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    splitter = EventSplitter()
    out = [splitter.feed(data[start:end]) for start, end in pairwise(bounds)]
    assert b"".join(out) == data
    assert all(piece == b"" or (piece.startswith(b"data: ") and piece.endswith(b"\n\n")) for piece in out)


@given(st.lists(texts, min_size=1, max_size=6))
def test_signature_changes_only_what_it_should(contents: list[str]) -> None:
    signature = AnswerRewriter("f-1", engine_model="base", requested_model='base:"é"')
    signed = signature.on_events(b"".join(events_of(contents)) + DONE)
    *lines, done = signed.split(b"\n\n")[:-1]
    assert done + b"\n\n" == DONE
    for content, line in zip(contents, lines, strict=True):
        assert json.loads(line.removeprefix(b"data: ")) == {
            "system_fingerprint": "f-1",
            "id": "r",
            "object": "c",
            "model": 'base:"é"',
            "choices": [{"text": content, "finish_reason": None}],
        }


def test_answer() -> None:
    answer = b'{"id":"r","model":"base","choices":[{"text":"{\\"id\\":\\"model\\":\\"base\\""}]}'
    signature = AnswerRewriter("f", engine_model="base", requested_model="a0")
    assert json.loads(signature.on_answer(answer)) == {**json.loads(answer), "system_fingerprint": "f", "model": "a0"}


def test_later_pieces_of_a_call_name_nothing() -> None:
    """As SGLang writes them. OpenAI's client for Node refuses a call whose name becomes null."""
    head, text = b'data: {"id":"r","model":"base","choices":[{"delta":{"role":null,"tool_calls":[', json.dumps(NASTY)
    first = b'{"id":"c","index":0,"type":"function","function":{"name":"f","arguments":""}}'
    later = b'{"id":null,"index":0,"type":"function","function":{"name":null,"arguments":%b}}' % text.encode()
    signed = AnswerRewriter("f", engine_model="base", requested_model="base").on_events(
        b"".join(head + call + b"]}}]}\n\n" for call in (first, b",".join([later, later])))
    )
    (named,), others = (
        json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]["tool_calls"]
        for event in signed.split(b"\n\n")[:-1]
    )
    assert named == json.loads(first)
    assert others == [{"index": 0, "type": "function", "function": {"arguments": NASTY}}] * 2


@pytest.mark.parametrize("logprobs", [b'{"text_offset":[-1,-1],"tokens":%b}', b'{"tokens":%b,"text_offset":[-1]}'])
def test_answers_have_no_text_offsets(logprobs: bytes) -> None:
    tokens = ['"text_offset":[-1],', ',"text_offset":[-1]}', "text_offset"]
    found = logprobs % json.dumps(tokens, separators=(",", ":")).encode()
    answer = b'{"id":"r","choices":[{"logprobs":%b},{"logprobs":%b}]}' % (found, found)
    rewriter = AnswerRewriter("f", engine_model="base", requested_model="base")
    events = rewriter.on_events((b"data: " + answer + b"\n\n") * 2).split(b"\n\n")
    for each in (rewriter.on_answer(answer), *(event.removeprefix(b"data: ") for event in events[:-1])):
        assert json.loads(each)["choices"] == [{"logprobs": {"tokens": tokens}}] * 2


def test_model_stays_when_the_client_named_the_base() -> None:
    signature = AnswerRewriter("f", engine_model="base", requested_model="base")
    (event,) = events_of(["x"])
    assert signature.on_events(event) == event.replace(b'{"id"', b'{"system_fingerprint":"f","id"')


@given(texts)
def test_what_a_model_writes_is_no_abort_and_no_error(content: str) -> None:
    (event,) = events_of([content])
    assert not is_aborted(event)
    assert error_in(event) is None
    assert not any(word in event for word in FAILURE_WORDS)


def test_aborts_and_errors_are_seen() -> None:
    (event,) = events_of(["x"])
    assert is_aborted(event.replace(b'"finish_reason":null', b'"finish_reason":"abort"'))
    assert error_in(event + b'data: {"error": {"code": 500}}\n\n' + DONE) == b'{"error": {"code": 500}}'
    for failure in (
        b'"finish_reason":"abort"',
        b'data: {"error": {"code": 500}}',
        b'data: {"object":"error","code":1}',
    ):
        assert any(word in failure for word in FAILURE_WORDS)
        assert is_aborted(failure) or error_in(failure + b"\n\n")


# ---- the usage event is taken out of a stream, and nothing else is --------------------------------------------------

TEXT = r'"choices":[],"usage":{"completion_tokens":9}}'  # what a model may write
COUNTS = {"prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": None}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps({"id": "r", **fields}, separators=(",", ":")).encode() + b"\n\n"


TOKEN = event(choices=[{"text": TEXT}], usage=None)
CONTINUOUS = event(choices=[{"text": "x"}], usage=COUNTS)
DETAILS = event(choices=[], sglext={"cached_tokens_details": {"device": 1}})
USAGE = event(choices=[], usage=COUNTS)


@pytest.mark.parametrize("after", [b"", DONE])
@pytest.mark.parametrize("before", [b"", TOKEN, CONTINUOUS + TOKEN, TOKEN + DETAILS])
def test_the_usage_event_is_taken_out_wherever_it_is(before: bytes, after: bytes) -> None:
    rest, usage = take_usage(before + USAGE + after, keeps=False)
    assert rest == before + after
    assert USAGE.endswith(USAGE_END)
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 5)
    assert take_usage(before + USAGE + after, keeps=True) == (before + USAGE + after, usage)


@pytest.mark.parametrize("events", [TOKEN, CONTINUOUS, DETAILS, DONE, TOKEN + DONE, b'data: {"choices":[],\n\n'])
def test_other_events_stay(events: bytes) -> None:
    assert take_usage(events, keeps=False) == (events, None)
