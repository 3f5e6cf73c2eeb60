"""The usage event is taken out of a stream, and nothing else is."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from router.protocol.sse import DONE, USAGE_END, take_usage

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
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 5)
    assert take_usage(before + USAGE + after, keeps=True) == (before + USAGE + after, usage)


@pytest.mark.parametrize("events", [TOKEN, CONTINUOUS, DETAILS, DONE, TOKEN + DONE, b'data: {"choices":[],\n\n'])
def test_other_events_stay(events: bytes) -> None:
    assert take_usage(events, keeps=False) == (events, None)


@pytest.mark.parametrize("name", ["ChatCompletionStreamResponse", "CompletionStreamResponse"])
def test_events_of_sglang_end_with_their_usage(name: str) -> None:
    """`sglext` comes in an event of its own, and is left out of others."""
    spec = importlib.util.find_spec("sglang")  # finds it without importing it
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt/entrypoints/openai/protocol.py").read_text()
    (found,) = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == name]
    fields = [
        each.target.id for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    assert fields[-3:] == ["choices", "usage", "sglext"]
    assert USAGE.endswith(USAGE_END)
