"""Record what the router of 0.1.0 (commit 8f84249) answered, in a checkout of it, with today's environment:

PYTHONPATH=.:tests/unit/router .venv/bin/python /path/to/generate.py

Everything is asked twice, on new clusters: what differs between the two is recorded by its type.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))

import router_stand_ins as stand_ins
from router.fields import REFUSED
from support.routers.recorded_answers import ask, mended, recorded

HELLO = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "base", "messages": HELLO}
COMPLETION: dict[str, Any] = {"model": "base", "prompt": "Hi"}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "completion": ("/v1/completions", COMPLETION)}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

# Values that a client may give, of each field that 0.1.0 took.
OF_BOTH = {
    "adapter": ["a0", "a0@latest", "a0@r1", "default/a0", f"a0@{stand_ins.REVISION_ID}", None],
    "best_of": [1, None],
    "frequency_penalty": [0.5, -2, 2, None],
    "ignore_eos": [True, None],
    "json_schema": ['{"type": "object"}'],
    "logit_bias": [{"5": 1}, {"5": -100.0}, {}, None],
    "max_completion_tokens": [5, None],
    "max_dynamic_patch": [4],
    "max_tokens": [5, 2**31 - 1, None],
    "min_dynamic_patch": [1],
    "min_p": [0.1, 0, 1],
    "min_tokens": [0, 1],
    "model": ["a0", "base:a0", "a0@r1", "base:default/a0"],
    "n": [2, 1, None],
    "no_stop_trim": [True],
    "presence_penalty": [0.5, -2, 2, None],
    "regex": ["[a-z]+", "(ab|cd){1,3}"],
    "ebnf": ['root ::= "a"'],
    "repetition_penalty": [1.1, 0.5, 2],
    "response_format": [{"type": "text"}, {"type": "json_object"}, SCHEMA, None],
    "return_cached_tokens_details": [True],
    "return_prompt_token_ids": [True],
    "return_token_ids": [True],
    "seed": [7, -1, 2**62, None],
    "separate_reasoning": [False],
    "skip_special_tokens": [False],
    "stop": ["x", ["x", "yz"], [], None],
    "stop_token_ids": [[3, 999], [], None],
    "stream": [False, None],
    "stream_options": [{"include_usage": True}, None],
    "stream_reasoning": [False],
    "temperature": [0, 0.5, 1, 2, 100, None],
    "top_k": [-1, 5, 2**31 - 1],
    "top_p": [0.9, 1, None],
    "use_audio_in_video": [False],
    "user": ["ann", None],
    "new_field": [1, None],
}
TAKEN = {
    "chat": {
        **OF_BOTH,
        "chat_template_kwargs": [{"enable_thinking": False}, {"other": 1}, None],
        "continue_final_message": [False],
        "echo": [True],
        "input_ids": [[1, 2, 3]],
        "logprobs": [True, False, None],
        "messages": [
            [{"role": "system", "content": "Be short."}, *HELLO],
            [{"role": "developer", "content": "Be short."}, *HELLO],
            [*HELLO, {"role": "assistant", "content": "Hello"}, *HELLO],
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"}],
            [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "seen"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
        ],
        "parallel_tool_calls": [True, None],
        "prompt": ["Hi"],
        "reasoning_effort": ["low", None],
        "task": ["x"],
        "tool_choice": ["auto", "none", None],
        "tools": [[TOOL], None],
        "top_logprobs": [2, 0, None],
    },
    "completion": {
        **OF_BOTH,
        "echo": [True, False, None],
        "logprobs": [1, 0, None],
        "messages": [HELLO],
        "prompt": ["Hi", ["Hi"], [1, 2, 3], [[1, 2, 3]], ["Hi", "Hello"], [[1], [2, 3]], [0]],
        "suffix": ["end", None],
        "tools": [[TOOL]],
        "top_logprobs": [2],
    },
}  # fmt: skip
WRONG_OF_BOTH: list[dict[str, Any]] = [
    {"model": None}, {"model": ""}, {"model": ["base"]}, {"model": 1}, {"adapter": 1}, {"adapter": ""},
    {"stream": "yes"}, {"stream": 1}, {"n": 0}, {"n": 1.0}, {"n": True}, {"n": "2"}, {"n": 129}, {"n": 10**30},
    {"max_tokens": "5"}, {"max_tokens": -1}, {"max_tokens": 2**31}, {"max_tokens": 1.5},
    {"max_completion_tokens": 0}, {"max_completion_tokens": -1}, {"seed": 1.5}, {"seed": 2**63},
    {"min_tokens": -1}, {"min_tokens": 10**30}, {"top_k": -2}, {"top_k": 10**30}, {"top_k": "x"},
    {"top_logprobs": 101}, {"top_logprobs": -1}, {"temperature": "hot"}, {"temperature": -0.1},
    {"temperature": 1e300}, {"logit_bias": {"5": 1e300}}, {"logit_bias": {"5": 101}}, {"logit_bias": [1]},
    {"logit_bias": {"5": "x"}}, {"response_format": "json"}, {"response_format": []}, {"stop_token_ids": [10**6]},
    {"stop_token_ids": [-1]}, {"stop_token_ids": "x"}, {"stream": True, "stream_options": []},
    {"stream": True, "stream_options": {"include_usage": "yes"}}, {"adapter": "a9"}, {"adapter": "a0@r9"},
    {"adapter": "a0@none"}, {"adapter": "a b"}, {"adapter": "a0@"}, {"adapter": "acme/a0"}, {"adapter": "broken"},
    {"adapter": "everywhere"}, {"model": "broken"}, {"model": "a9"}, {"model": "everywhere"}, {"model": "base:a9"},
    {"model": "other:a0"}, {"model": "a b"}, {"model": "base:a0", "adapter": "a1"}, {"model": "a0", "adapter": "a1"},
]  # fmt: skip
WRONG = {
    "chat": [
        *WRONG_OF_BOTH, {"max_tokens": 0}, {"messages": []}, {"messages": "Hi"}, {"messages": ["Hi"]},
        {"messages": None}, {"messages": {"role": "user"}}, {"messages": [{"content": "Hi"}]},
        {"messages": [{"role": "king", "content": "Hi"}]}, {"messages": [{"role": 1, "content": "Hi"}]},
        {"input_ids": [1000]}, {"input_ids": [-1]}, {"input_ids": "x"},
    ],
    "completion": [
        *WRONG_OF_BOTH, {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": ["a", ""]},
        {"prompt": ["a", [1]]}, {"prompt": [[1], "a"]}, {"prompt": [1, "a"]}, {"prompt": [True]}, {"prompt": [1.5]},
        {"prompt": [1, 1000]}, {"prompt": [[1], [-5]]}, {"prompt": {"text": "a"}}, {"prompt": 5},
        {"prompt": ["a"] * 129}, {"n": 3, "prompt": ["a"] * 43}, {"best_of": 2}, {"n": 2, "best_of": 1},
        {"logprobs": -1}, {"logprobs": 101}, {"logprobs": True}, {"echo": "x"},
        {"echo": True, "logprobs": 1, "stream": True},
    ],
}  # fmt: skip


def inference(*kinds: str, with_fields: bool = True) -> dict[str, Any]:
    """Requests to generate: whole and streamed, with every field, and wrong ones."""
    found = {}
    for kind in kinds:
        path, fields = PATHS[kind]

        def add(name: str, extra: dict[str, Any], kind=kind, path=path, fields=fields, **rest: Any) -> None:
            assert f"{kind}: {name}" not in found, name
            found[f"{kind}: {name}"] = {"method": "POST", "path": path, "json": {**fields, **extra}, **rest}

        add("plain", {})
        for adapter in (None, "a0"):
            named = {} if adapter is None else {"adapter": adapter}
            add(f"stream {named}", {"stream": True, **named})
            add(f"stream with usage {named}", {"stream": True, "stream_options": {"include_usage": True}, **named})
            add(f"stream of two {named}", {"stream": True, "n": 2, "stream_options": {"include_usage": True}, **named})
            add(f"two {named}", {"n": 2, **named})
        add("stream for a model that is an adapter", {"stream": True, "model": "a0"})
        if not with_fields:
            add("adapter for all positions", {"adapter": "everywhere"})
            continue
        for name, values in TAKEN[kind].items():
            for value in values:
                add(f"{name} = {json.dumps(value)[:80]}", {name: value})
        for name in sorted(REFUSED):
            add(f"{name} is refused", {name: "x"})
            add(f"{name} = null", {name: None})
        for wrong in WRONG[kind]:
            add(f"wrong {json.dumps(wrong)[:80]}", wrong)
    return found


def bodies() -> dict[str, Any]:
    """Bodies, methods and paths."""
    found = {}
    for body in (
        "", "{", "[]", "null", '"x"', '{"model": "base", "prompt": "\xff"}', "{}",
        '{"model": "base", "prompt": "Hi", "temperature": NaN}',
        '{"model": "base", "prompt": "Hi", "lor\\u0061_path": "x"}',
        '{"model": "base", "prompt": "Hi", "lora_path": null, "lora_path": "x"}',
        '{"model": "base", "prompt": ' + "[" * 101 + "]" * 101 + "}",
        '{"model": "base", "prompt": "' + "x" * 1100 + '"}',
        '{"model":"base","prompt": "caf\\u00e9" ,"temperature":1.50, "user" : null}',
    ):  # fmt: skip
        headers = {"content-type": "application/json"}
        exchange = {"method": "POST", "path": "/v1/completions", "body": body, "headers": headers}
        found[f"body {body[:70]} of {len(body)}"] = exchange
    for headers in ({"content-type": "text/plain"}, {"content-encoding": "br", "content-type": "application/json"}):
        exchange = {"method": "POST", "path": "/v1/completions", "body": '{"model": "base"}', "headers": headers}
        found[f"headers {headers}"] = exchange
    for method, path in (
        ("GET", "/v1/models"), ("GET", "/v1/models?after=a0"), ("GET", "/v1/models?after=base"),
        ("GET", "/v1/models?after=a%20b"), ("GET", "/v1/models/base"), ("GET", "/v1/models/a0"),
        ("GET", "/v1/models/base:a0"), ("GET", "/v1/models/default/a0"), ("GET", "/v1/models/a0@r1"),
        ("GET", "/v1/models/a9"), ("GET", "/v1/models/a%20b"), ("GET", "/health"), ("HEAD", "/health"),
        ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/debug/requests"), ("GET", "/v1/completions"),
        ("PUT", "/v1/chat/completions"), ("POST", "/v1/models"), ("POST", "/health"), ("GET", "/"),
        ("GET", "/v1/nothing"), ("POST", "/v1/nothing"), ("GET", "/v1/models/"), ("GET", "/health/"),
        ("GET", "/v1/adapters"), ("POST", "/v1/adapters"), ("GET", "/v1/adapters/a0"),
        ("GET", "/v1/adapters/a0/export"), ("DELETE", "/v1/adapters/a0"), ("GET", "/v1/adapters/a0/aliases/prod"),
        ("PUT", "/v1/adapters/a0/aliases/prod"), ("POST", "/v1/adapters/a0/restore"),
        ("POST", "/v1/adapters/a0/rollback"), ("POST", "/v1/adapters/a0/push"), ("POST", "/v1/adapters/a0/prewarm"),
        ("POST", "/v1/adapters/a0/pin"), ("POST", "/v1/adapters/a0/unpin"), ("POST", "/v1/adapters/a0/evict"),
        ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
    ):  # fmt: skip
        found[f"{method} {path}"] = {"method": method, "path": path}
    return found


def failures() -> dict[str, Any]:
    """Engines that refuse, fail and break."""

    def error(status: int, message: str) -> list[Any]:
        return [
            "answers",
            status,
            {"object": "error", "message": message, "type": "x", "param": None, "code": status},
        ]

    long = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    dump = (
        "1 validation error:\n  {'type': 'float_parsing', 'loc': ('body', 'top_p'), 'msg': 'Input should be a valid "
        "number, unable to parse string as a number', 'input': 'hot'}\n\n  Endpoint: POST /v1/completions []"
    )
    cases: dict[str, Any] = {
        "too long": error(400, long),
        "a field that the engine finds wrong": error(400, dump),
        "not found": error(404, "x"),
        "server error": error(500, "x"),
        "busy": error(503, "x"),
        "drops": "drops",
        "breaks after an event": ["breaks_after", 2],
    }
    found = {}
    for name, behaviour in cases.items():
        # The other engine of a pair waits for a hand-over that does not come, but with an event that it has sent.
        first = [] if name.startswith("breaks") else ["hangs"]
        for stream in (False, True):
            if not stream and name.startswith("breaks"):
                continue
            exchange = {"method": "POST", "path": "/v1/completions", "json": {**COMPLETION, "stream": stream}}
            on_both = {"p0": [behaviour] * 3, "d0": [behaviour] * 3} if name[0] in "ant" else None
            engines = on_both or {"p0": first * 3, "d0": [behaviour] * 3}
            found[f"{name}, stream {stream}"] = {**exchange, "engines": engines}
    return found


def prompt_logprobs() -> dict[str, Any]:
    """`echo` with log-probabilities."""

    def answer(*tokens: str) -> list[Any]:
        values = [None if token == "<s>" else -0.5 for token in tokens]
        logprobs = {
            "tokens": list(tokens), "token_logprobs": values, "text_offset": [-1] * len(tokens),
            "top_logprobs": [None if value is None else {"x": value} for value in values],
        }  # fmt: skip
        choice = {"index": 0, "finish_reason": "stop", "matched_stop": None, "logprobs": logprobs}
        usage = stand_ins.usage(len(tokens))
        head = {"id": "x", "object": "text_completion", "created": 1, "model": "base", "usage": usage}
        return ["answers", 200, {**head, "choices": [{**choice, "text": "".join(tokens)}]}]

    asked = {**COMPLETION, "echo": True, "logprobs": 1}
    engines = {"p0": [answer("<s>", "Hi", "Hello")], "d0": [answer("Hello", " wide", " world")]}
    exchange = {"method": "POST", "path": "/v1/completions", "json": asked, "engines": engines}
    return {"of the prompt": exchange}


def management() -> dict[str, Any]:
    """Adapters managed over HTTP, one after the other."""
    found: dict[str, Any] = {}

    def add(name: str, method: str, path: str, fields: Any = None, **rest: Any) -> None:
        body = {} if fields is None else {"json": fields}
        found[name] = {"method": method, "path": path, **body, **rest}

    def upload(name: str, path: str, directory: str | None = "a0", /, **fields: str) -> None:
        files = [] if directory is None else [["", directory]]
        found[name] = {"method": "POST", "path": path, "form": [*map(list, fields.items()), *files]}

    one = "/v1/adapters/acme/legal"
    for path in ("", "?limit=1", "?prefix=a", "?tenant=acme", "?deleted=true", "?after=a0"):
        add(f"list {path}", "GET", f"/v1/adapters{path}")
    upload("upload", "/v1/adapters", name="acme/legal")
    upload("upload the same content", "/v1/adapters", name="acme/legal")
    upload("upload with an alias", "/v1/adapters", "everywhere", name="acme/legal", alias="prod")
    upload("upload without a name", "/v1/adapters")
    upload("upload without files", "/v1/adapters", None, name="acme/legal")
    upload("upload a damaged file", "/v1/adapters", "broken", name="acme/legal")
    for field in ("a b", "../x", "base"):
        upload(f"upload as {field}", "/v1/adapters", name=field)
    upload("upload with an unknown field", "/v1/adapters", name="bot", tenant="x")
    upload("upload with a bad alias", "/v1/adapters", name="bot", alias="a b")
    add("upload of JSON", "POST", "/v1/adapters", {})
    add("list of all", "GET", "/v1/adapters")
    add("list of a tenant", "GET", "/v1/adapters?tenant=acme")
    add("generate", "POST", "/v1/chat/completions", {**CHAT, "adapter": "acme/legal"})
    add("models", "GET", "/v1/models")
    add("show", "GET", one)
    add("show the newest", "GET", f"{one}?limit=1")
    add("show with a slash that is written out", "GET", "/v1/adapters/acme%2Flegal")
    for name, path in (("none", "none"), ("bad name", "a%20b"), ("too deep", "a/b/c")):
        add(f"show {name}", "GET", f"/v1/adapters/{path}")
    for query in ("limit=0", "limit=1001", "limit=x", "deleted=1", "after=a%20b", "other=1"):
        add(f"list with {query}", "GET", f"/v1/adapters?{query}")
    add("alias", "PUT", f"{one}/aliases/prod", {"revision": "r1"})
    add("alias by revision", "PUT", f"{one}/aliases/prod", {"revision": stand_ins.EVERYWHERE_ID, "expected": "r1"})
    add("new alias", "PUT", f"{one}/aliases/blue", {"revision": "r1", "expected": None})
    add("alias that is not new", "PUT", f"{one}/aliases/blue", {"revision": "r2", "expected": None})
    add("alias from elsewhere", "PUT", f"{one}/aliases/prod", {"revision": "r1", "expected": "r1"})
    wrong_moves = ({}, {"revision": "r0"}, {"revision": "prod"}, {"revision": 1}, {"revision": "r9"},
        {"revision": "r1", "other": 1}, {"revision": "r1", "expected": 1})  # fmt: skip
    for fields in wrong_moves:
        add(f"alias {fields}", "PUT", f"{one}/aliases/prod", fields)
    add("alias of nothing", "PUT", "/v1/adapters/none/aliases/prod", {"revision": "r1"})
    add("alias with a bad name", "PUT", f"{one}/aliases/a%20b", {"revision": "r1"})
    add("history", "GET", f"{one}/aliases/prod")
    add("history, the newest", "GET", f"{one}/aliases/prod?limit=1")
    add("history of no alias", "GET", f"{one}/aliases/none")
    add("rollback", "POST", f"{one}/rollback", {"alias": "prod"})
    add("rollback of latest", "POST", f"{one}/rollback")
    add("rollback of no alias", "POST", f"{one}/rollback", {"alias": "none"})
    add("rollback with an unknown field", "POST", f"{one}/rollback", {"to": "r1"})
    add("prewarm", "POST", f"{one}/prewarm")
    add("prewarm on disk", "POST", f"{one}/prewarm", {"tier": "disk", "workers": ["p0"], "reference": "r1"})
    add("show where it is", "GET", one)
    add("pin", "POST", f"{one}/pin", {"workers": ["p0"]})
    add("evict what is pinned", "POST", f"{one}/evict")
    add("unpin", "POST", f"{one}/unpin")
    add("evict", "POST", f"{one}/evict")
    for fields in ({"workers": ["d0"]}, {"workers": ["p9"]}, {"workers": "p0"}, {"worker": ["p0"]},
        {"reference": "a0@r1"}, {"reference": "none"}, {"tier": "gpu"}, {"tier": 1}):  # fmt: skip
        add(f"prewarm {fields}", "POST", f"{one}/prewarm", fields)
    add("pin with a tier", "POST", f"{one}/pin", {"tier": "disk"})
    add("pin of nothing", "POST", "/v1/adapters/none/pin")
    add("prewarm of what no worker takes", "POST", "/v1/adapters/everywhere/prewarm")
    add("make resident", "POST", f"{one}/prewarm", {"reference": "latest"})
    upload("push", f"{one}/push", "everywhere")
    upload("push back", f"{one}/push", "a0", wait_s="5")
    upload("push with an alias", f"{one}/push", "a0", alias="green")
    upload("push in memory only", "/v1/adapters/live/push", "a0", memory_only="true")
    upload("push with a bad time", f"{one}/push", "a0", wait_s="soon")
    upload("push with a bad flag", f"{one}/push", "a0", memory_only="maybe")
    add("export", "GET", f"{one}/export")
    for query in ("reference=r1", "reference=blue"):
        add(f"export {query}", "GET", f"{one}/export?{query}")
    for query in ("reference=r9", "reference=none", "reference=a0@r1", "reference=a%20b", "revision=r1"):
        add(f"export with {query}", "GET", f"{one}/export?{query}")
    add("export of nothing", "GET", "/v1/adapters/none/export")
    add("delete", "DELETE", one)
    add("delete again", "DELETE", one)
    add("generate with what is deleted", "POST", "/v1/completions", {**COMPLETION, "adapter": "acme/legal"})
    add("list of deleted ones", "GET", "/v1/adapters?deleted=true")
    add("restore", "POST", f"{one}/restore")
    add("restore again", "POST", f"{one}/restore")
    add("restore of nothing", "POST", "/v1/adapters/none/restore")
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        for fields in ({"lora_name": "bot", "lora_path": "a0", "lora_int_id": 1}, {"lora_name": "bot"},
            {"lora_name": 1, "lora_path": "a0"}, {"lora_name": "a b", "lora_path": "a0"},
            {"lora_name": "base", "lora_path": "a0"}, {"lora_name": "up", "lora_path": "../a0"},
            {"lora_name": "up", "lora_path": "none"}, {"lora_path": "a0"}):  # fmt: skip
            add(f"{path} {fields}", "POST", f"/v1/{path}", fields)
    fields = {"lora_name": "bot", "lora_path": "a0"}
    add("load again", "POST", "/v1/load_lora_adapter", fields)
    add("load what is loaded", "POST", "/v1/load_lora_adapter", fields)
    add("load in place", "POST", "/v1/load_lora_adapter", {**fields, "load_inplace": True})
    add("metrics", "GET", "/metrics")
    return found


GROUPS: dict[str, dict[str, Any]] = {
    "chats on a pair": {"workers": [1, 1, 0], "exchanges": inference("chat")},
    "completions on a pair": {"workers": [1, 1, 0], "exchanges": inference("completion")},
    "generation on a unified worker": {
        "workers": [0, 0, 1], "exchanges": inference("chat", "completion", with_fields=False)},
    "bodies and pages": {"workers": [1, 1, 0], "config": {"max_body_bytes": 1024}, "exchanges": bodies()},
    "pages beside a unified worker": {"workers": [1, 1, 1], "exchanges": {
        path: {"method": "GET", "path": path} for path in ("/ready", "/v1/models", "/v1/models/everywhere")}},
    "failures": {"workers": [1, 1, 0], "exchanges": failures()},
    "log-probabilities": {"workers": [1, 1, 0], "exchanges": prompt_logprobs()},
    "no worker is ready": {"workers": [1, 1, 0], "ready": False, "exchanges": {
        "/ready": {"method": "GET", "path": "/ready"},
        "completion": {"method": "POST", "path": "/v1/completions", "json": COMPLETION},
        "stream with an adapter": {"method": "POST", "path": "/v1/completions",
            "json": {**COMPLETION, "adapter": "a0", "stream": True}}}},
    "management": {"workers": [1, 1, 0], "config": {"management": True}, "exchanges": management()},
}  # fmt: skip


def events_as_engines_name_them(engine: Any, fields: dict[str, Any]) -> list[bytes]:
    """Today's stand-ins name the object of an event as SGLang does, those of 0.1.0 called all of them `chunk`."""
    name = b"chat.completion.chunk" if "messages" in fields else b"text_completion"
    return [event.replace(b'"object":"chunk"', b'"object":"%b"' % name) for event in events_of_0_1_0(engine, fields)]


events_of_0_1_0 = stand_ins.EngineStandIn.events
stand_ins.EngineStandIn.events = events_as_engines_name_them


async def answers(group: dict[str, Any]) -> list[Any]:
    config = dict(group.get("config", {}))
    if config.get("management"):
        config["adapter_root"] = stand_ins.TEMPLATE
    found = []
    async with stand_ins.running_cluster(*group["workers"], **config) as cluster:
        if not group.get("ready", True):
            for worker in cluster.workers:
                await worker.change(ready=False)
            await cluster.is_ready(False)
        for exchange in group["exchanges"].values():
            if config.get("management") and exchange["method"] == "GET":
                await asyncio.sleep(0.3)  # until what changed has been reported
            found.append(await ask(cluster, exchange, stand_ins))
            if "engines" in exchange:
                await mended(cluster)
    return found


async def main() -> None:
    for name, group in GROUPS.items():
        print(name, len(group["exchanges"]), flush=True)
        one = await answers(group)
        await asyncio.sleep(1.1)  # until another second, for times that have seconds only
        other = await answers(group)
        for exchange, *both in zip(group["exchanges"].values(), one, other, strict=True):
            exchange["answer"] = recorded(*both)
    write(Path(__file__).with_name("answers-0.1.0.json"))


def write(path: Path) -> None:
    """Each answer once, each exchange on a line."""
    answers: list[Any] = []
    for group in GROUPS.values():
        for exchange in group["exchanges"].values():
            if exchange["answer"] not in answers:
                answers.append(exchange["answer"])
            exchange["answer"] = answers.index(exchange["answer"])
    groups = []
    for name, group in GROUPS.items():
        exchanges = ",\n".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in group.pop("exchanges").items())
        groups.append(f'{json.dumps(name)}: {json.dumps(group)[:-1]}, "exchanges": {{\n{exchanges}}}}}')
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    path.write_text(f'{{"groups": {{\n{",".join(groups)}}},\n"answers": [\n{lines}]}}\n')


if __name__ == "__main__":
    asyncio.run(main())
