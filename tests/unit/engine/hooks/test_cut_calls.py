"""The arguments of a call that a limit cut, as SGLang would have streamed them."""

import json

import pytest

from engine.hooks.requests import cut_calls
from engine.hooks.requests.cut_calls import written_arguments


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a":1,"b" : [true,"x"]} more', '{"a": 1, "b": [true, "x"]}'),
        ('{"a": "\\u00e9\\n', '{"a": "é\\n'),
        ('{"a": "x\\u00', '{"a": "x'),
        ('{"a": "x\\', '{"a": "x'),
        ('{"a": "x\x01y", "b": 1}', '{"a": "x, "b": 1}'),
        ('{"a": 1.50, "b": 1.50', '{"a": 1.5, "b": 1.50'),
    ],
)
def test_they_are_spaced_and_escaped_up_to_where_the_text_ends(text: str, written: str):
    assert written_arguments(text) == written


def test_a_long_string_is_read_once(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    monkeypatch.setattr(cut_calls.json, "loads", lambda text, loads=json.loads: read.append(text) or loads(text))
    assert written_arguments('{"a": "x\x01' + "y" * 1000) == '{"a": "x'
    assert len(read) == 2  # strings
