"""An engine's lines in the log: what they say of the engine stays, what they may quote of requests does not."""

import pytest

from engine.output import REMOVED, EngineOutput

SECRET = "my-secret-grammar"
AT = "[2026-11-22 12:00:00 TP0] "


def shown(*lines: str) -> list[str]:
    output = EngineOutput()
    output.has_clients = True
    return [text for line in lines if (text := output.shown(line)) is not None]


@pytest.mark.parametrize(
    "line",
    [
        f"{AT}Hit invalid ebnf: key_string='root ::= {SECRET}', e=ValueError('{SECRET}')",
        f"{AT}skip invalid regex: {SECRET}, e=1",
        f"{AT}Grammar compilation raised an exception: {SECRET}, grammar_key=('json', '{SECRET}')",
        f"{AT}Tool call parsing error: {SECRET}",
        f"{AT}Error in request: {SECRET}",
        f"{AT}Skip unsupported key_type='ebnf', key_string='{SECRET}'",
        f"ERROR:    {{'{SECRET}'}}",
        f"ValueError: {SECRET}",
        f"xgrammar.exception.InvalidJSONError: {SECRET}",
        f'INFO:     127.0.0.1:5 - "GET /v1/models?q={SECRET} HTTP/1.1" 200 OK',
        SECRET,
        f"    {SECRET}",
    ],
)
def test_what_may_quote_a_request_is_cut(line: str):
    assert SECRET not in " ".join(shown(line, f"{SECRET} on its second line"))


def test_what_an_operator_needs_stays():
    lines = [
        f"{AT}Decode batch, #running-req: 3, #token: 400, token usage: 0.01",
        f"{AT}NIXL invalidated remote agent 0f3c9a52-7d11-4e0e-9d57-8d1f6a2b1c44; reloading its metadata",
        f"{AT}KV room 7: the prefill rank at 10.0.0.7:40123 has ended",
        'INFO:     127.0.0.1:5555 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "Traceback (most recent call last):",
        '  File "/site-packages/sglang/srt/managers/scheduler.py", line 10, in run_batch',
        "    result = self.forward(batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    assert shown(*lines) == lines
    assert shown(f"{AT}Hit invalid ebnf: key_string='x'") == [f"{AT}Hit invalid ebnf: {REMOVED}"]
    assert shown("RuntimeError: x") == [f"RuntimeError: {REMOVED}"]


def test_at_start_everything_is_shown():
    line = "ValueError: the model has no config.json"
    assert EngineOutput().shown(line) == line
