"""The arguments of a call that a limit cut: `tests/engine/test_hooks.py` has more of them."""

import json

import pytest

from engine.hooks.requests import cut_calls


@pytest.mark.parametrize(("text", "written"), [("x\x01y", "x"), ("\\u00e9\\q", "é"), ("x\\u00", "x"), ("x\\n", "x\\n")])
def test_a_string_is_read_once_up_to_what_is_none(text: str, written: str, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    monkeypatch.setattr(cut_calls.json, "loads", lambda text, loads=json.loads: read.append(text) or loads(text))
    assert cut_calls.written_arguments(f'{{"a": "{text}') == f'{{"a": "{written}'
    assert len(read) == 2  # the name, and it
