"""The most expensive request bodies that were found: refused ones, and the largest that are admitted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MIB = 1024**2
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"


@dataclass(frozen=True, slots=True)
class CostlyBody:
    """One request."""

    name: str
    path: str
    body: bytes


def refused(model: str, max_bytes: int) -> list[CostlyBody]:
    """Bodies just below the limit of a body's bytes that a router must refuse quickly."""
    head, room = f'{{"model":"{model}","prompt":'.encode(), max_bytes - 100

    def filled(name: str, path: str, start: bytes, unit: bytes, end: bytes) -> CostlyBody:
        return CostlyBody(name, path, start + unit * ((room - len(start)) // len(unit)) + end)

    keys = b",".join(b'"%d":1' % n for n in range(room // 13))
    messages = b'{"model":"%b","messages":[' % model.encode()
    return [
        filled("token ids", COMPLETIONS, head + b"[", b"1,", b"1]}"),
        filled("token ids in lists", COMPLETIONS, head + b"[", b"[1],", b"[1]]}"),
        filled("long lists of token ids", COMPLETIONS, head + b"[", b"[" + b"1," * 100_000 + b"1],", b"[1]]}"),
        CostlyBody("unknown fields", COMPLETIONS, head[:-9] + keys + b"}"),
        filled("one field again and again", COMPLETIONS, b"{", b'"n":1,', b'"n":1}'),
        filled("empty strings", COMPLETIONS, head + b"[", b'"",', b'""]}'),
        filled("backslashes", COMPLETIONS, head + b'"', b"\\\\", b'"}'),
        filled("brackets in a string", COMPLETIONS, head + b'"', b"[{", b'"}'),
        filled("nested lists", COMPLETIONS, head, b"[", b""),
        filled("empty messages", CHAT, messages, b"{},", b"{}]}"),
        filled("one long message", CHAT, messages + b'{"role":"user","content":"', "中".encode(), b'"}]}'),
        filled("strings to tokenize", TOKENIZE, b'{"prompt":[', b'"a",', b'"a"]}'),
        filled("token ids to make a text of", DETOKENIZE, b'{"tokens":[', b"1,", b"1]}"),
        filled("stop strings", COMPLETIONS, head + b'"x","stop":[', b'"a",', b'"a"]}'),
        filled("biases", COMPLETIONS, head + b'"x","logit_bias":{', b'"1":1,', b'"1":1}}'),
    ]


def admitted(model: str, context_length: int, max_choices: int, num_biases: int = 1024) -> list[CostlyBody]:
    """Bodies at the limits of `router.limits`, in its default configuration."""
    prompt_bytes = 16 * context_length - 1000

    def chat(name: str, **fields: Any) -> CostlyBody:
        given = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
        return CostlyBody(name, CHAT, json.dumps(given, ensure_ascii=False).encode())

    def completion(name: str, **fields: Any) -> CostlyBody:
        return CostlyBody(name, COMPLETIONS, json.dumps({"model": model, "max_tokens": 2, **fields}).encode())

    def text(num_bytes: int, word: str = "the sea and ") -> str:
        return word * (num_bytes // len(word))

    optional = {f"p{n}": {"type": "string", "enum": [f"a{n}", "b"]} for n in range(64)}
    schema = {"type": "object", "properties": optional, "additionalProperties": False}
    counted = {f"q{n}": {"type": "string", "maxLength": 40 + n} for n in range(16)}
    long_strings = {"type": "object", "properties": counted, "required": [*counted]}
    nested: dict[str, Any] = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(30)}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": "d" * 20, "parameters": nested}}
        for n in range(110)
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    shared = 24 * MIB // max_choices
    ids = [100] * context_length
    lists = [[100] * (context_length // 1024)] * 1024
    return [
        completion("a prompt of the most bytes", prompt=text(prompt_bytes)),
        completion("one word of the most bytes", prompt="a" * prompt_bytes),
        chat("a chat of the most bytes", messages=[{"role": "user", "content": text(prompt_bytes)}]),
        completion("the most token ids", prompt=[100] * (context_length - 10)),
        chat("the most token ids in a chat", input_ids=[100] * (context_length - 10)),
        chat("1,024 messages", messages=[{"role": "user", "content": "a"}] * 1024),
        chat("1,024 parts", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 1024}]),
        chat("110 tools", tools=tools),
        completion(f"{max_choices} choices of a long prompt", n=max_choices, prompt=text(min(shared, prompt_bytes))),
        completion(f"{max_choices} short prompts", prompt=["the sea"] * max_choices),
        completion("32 stop strings", prompt="the", stop=["x" * 32] * 32),
        completion(f"{num_biases:,} biases", prompt="the", logit_bias={str(n): 1.5 for n in range(num_biases)}),
        completion("100 log-probabilities", prompt="the", logprobs=100, max_tokens=16),
        chat("2,500 tokens with 100 alternatives each", **_many_log_probabilities("logprobs", True, top_logprobs=100)),
        completion("2,500 tokens of a completion, the same", prompt="the", **_many_log_probabilities("logprobs", 100)),
        completion("log-probabilities of a prompt", prompt=text(32_000), echo=True, logprobs=1, max_tokens=0),
        completion("log-probabilities of 16,000 tokens", prompt="~" * 16_000, echo=True, logprobs=1, max_tokens=0),
        chat("a schema with 64 optional properties", response_format=form | _schema(form, schema)),
        chat("a schema with 16 counted strings", response_format=form | _schema(form, long_strings)),
        completion("a regular expression of 1 KiB", prompt="the", regex="".join(f"(a{n}|b+)c" for n in range(110))),
        CostlyBody("token ids of the most bytes", TOKENIZE, json.dumps({"prompt": text(prompt_bytes)}).encode()),
        CostlyBody("token ids of 1,024 strings", TOKENIZE, json.dumps({"prompt": ["the sea"] * 1024}).encode()),
        CostlyBody("the text of the most token ids", DETOKENIZE, json.dumps({"tokens": ids}).encode()),
        CostlyBody("the texts of 1,024 lists", DETOKENIZE, json.dumps({"tokens": lists}).encode()),
    ]


def _many_log_probabilities(name: str, value: Any, **fields: Any) -> dict[str, Any]:
    """Nearly `answer_logprobs` of them."""
    return {name: value, **fields, "max_tokens": 2500, "ignore_eos": True}


def _schema(form: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {**form["json_schema"], "schema": schema}}
