"""A stand-in of an engine's HTTP API, and behaviours that a test can give it."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from support.routers.served_routes import kill, serve

WORDS = ("Hello", " wide", " world")
TEXT = "".join(WORDS)
MESSAGES = [{"role": "user", "content": "Hi"}]  # what tests send in chats
NUM_PROMPT_TOKENS = 7

Behaviour = Callable[["EngineStandIn", dict[str, Any], web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class EngineStandIn:
    """An engine's HTTP server. Each request consumes one of `behaviours`; one that returns None answers as usual."""

    role: str
    words: tuple[str, ...] = WORDS
    thoughts: tuple[str, ...] = ()  # streamed before the words of a chat, as with a reasoning_parser
    event_gap_s: float = 0.0
    num_hidden_tokens: int = 0  # generated, and counted, with no text and so without an event
    num_cached_tokens: int = 0  # of each prompt, that its answer says were in the prefix cache
    behaviours: list[Behaviour] = field(default_factory=list)
    hangs_at_texts: bool = False  # when it is asked for the text of token ids
    num_texts: int = 0  # that it was asked for
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    abort_events: dict[str, asyncio.Event] = field(default_factory=dict)
    num_running: int = 0
    key: str = ""  # that requests must have; "": none
    tls: ssl.SSLContext | None = None
    num_refused: int = 0  # for want of the key
    runner: web.AppRunner | None = None
    url: str = ""

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    async def start(self, port: int = 0) -> None:
        routes = [web.post(f"/v1/{path}", self.handle) for path in ("chat/completions", "completions")]
        routes += [web.post("/generate", self.handle), web.post("/abort_request", self.abort)]
        routes += [web.post("/v1/tokenize", self.tokenize), web.post("/v1/detokenize", self.detokenize)]
        limits: Any = {"client_max_size": 64 * 1024**2, "middlewares": [self._ask_for_key]}
        self.runner, port = await serve(routes, port, self.tls, **limits)
        self.url = f"http{'' if self.tls is None else 's'}://127.0.0.1:{port}"

    @web.middleware
    async def _ask_for_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            self.num_refused += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def stop(self) -> None:
        """End as a killed process does: streams in flight are cut."""
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await kill(runner)

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.abort_events:
            self.abort_events[rid].set()
        return web.Response()

    async def tokenize(self, request: web.Request) -> web.Response:
        """A number for each word."""
        self.bodies.append(await request.read())
        fields = await request.json()
        prompt = fields.get("prompt")
        if prompt is None:
            prompt = " ".join(str(message.get("content")) for message in fields["messages"])
        tokens = [list(range(len(each.split()))) for each in ([prompt] if isinstance(prompt, str) else prompt)]
        one = tokens[0] if isinstance(prompt, str) else tokens
        return web.json_response({"tokens": one, "count": len(one), "max_model_len": 2048})

    async def detokenize(self, request: web.Request) -> web.Response:
        """Words for numbers. A list of lists gives a list of texts."""
        self.num_texts += 1
        if self.hangs_at_texts:
            await asyncio.sleep(3600)
        tokens = (await request.json())["tokens"]
        are_many = tokens[:1] != [] and isinstance(tokens[0], list)
        texts = [" ".join(f"w{token}" for token in each) for each in (tokens if are_many else [tokens])]
        return web.json_response({"text": texts if are_many else texts[0]})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fields = json.loads(body)
        self.abort_events[fields["rid"]] = asyncio.Event()
        self.num_running += 1
        try:
            if self.behaviours:
                response = await self.behaviours.pop(0)(self, fields, request)
                if response is not None:
                    return response
            if fields.get("stream"):
                return await self.stream(fields, request)
            return web.json_response(self.answer(fields), dumps=_dumps)
        finally:
            self.num_running -= 1

    def answer(self, fields: dict[str, Any], **choice: Any) -> dict[str, Any]:
        words = self.words[:1] if self.role == "prefill" or fields.get("max_tokens") == 1 else self.words
        if "return_hidden_states" in fields:
            return {"text": words[0], "meta_info": {**self._meta_info, "hidden_states": [3.0, 0.0, -4.0]}}
        choice = {"index": 0, "finish_reason": "stop", "matched_stop": None, "logprobs": None, **choice}
        if "messages" in fields:
            choice["message"] = {"role": "assistant", "content": "".join(words)}
        else:
            choice["text"] = "".join(words)
            if fields.get("logprobs") is not None:
                reads = fields.get("echo") and self.role != "decode"
                if reads and not fields["logprobs"]:
                    raise KeyError("input_top_logprobs")  # as SGLang does
                choice["logprobs"] = _logprobs([*(["p"] * NUM_PROMPT_TOKENS if reads else []), *words])
            choice |= {"token_ids": [5]} if fields.get("return_token_ids") else {}
        return {
            "id": fields["rid"],
            "object": "chat.completion" if "messages" in fields else "text_completion",
            "created": 1,
            "model": fields["model"],
            "choices": [choice],
            "usage": usage(len(words), self.num_cached_tokens),
            "metadata": {"weight_version": "default"},
        }

    @property
    def _meta_info(self) -> dict[str, Any]:
        return {"prompt_tokens": NUM_PROMPT_TOKENS, "cached_tokens": self.num_cached_tokens}

    @property
    def _streamed_usage(self) -> dict[str, Any]:
        return usage(len(self.words) + self.num_hidden_tokens, self.num_cached_tokens)

    def events(self, fields: dict[str, Any]) -> list[bytes]:
        kind = "chat.completion.chunk" if "messages" in fields else "text_completion"
        head = {"id": fields["rid"], "object": kind, "created": 1, "model": fields["model"]}

        def choice(**values: Any) -> list[dict[str, Any]]:
            return [{"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None} | values]

        if "messages" in fields:
            parts = [choice(delta={"role": "assistant", "content": ""})]
            parts += [choice(delta={"content": None, "reasoning_content": each}) for each in self.thoughts]
            parts += [choice(delta={"content": word}) for word in self.words]
            parts += [choice(delta={}, finish_reason="stop")]
        else:
            parts = [choice(text=word) for word in self.words[:-1]]
            parts += [choice(text=self.words[-1], finish_reason="stop")]
        chunks = [{**head, "choices": part, "usage": None} for part in parts]
        if (fields.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": self._streamed_usage})
        return [b"data: " + _dumps(chunk).encode() + b"\n\n" for chunk in chunks]

    async def stream(self, fields: dict[str, Any], request: web.Request, num_events: int = 10**9) -> web.StreamResponse:
        """Send the whole stream, or its first events only."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events = self.events(fields)
        for event in events[:num_events]:
            if self.event_gap_s:
                await asyncio.sleep(self.event_gap_s)
            await response.write(event)
        if num_events >= len(events):
            await response.write(b"data: [DONE]\n\n")
        return response


def usage(num_completion_tokens: int, num_cached_tokens: int = 0) -> dict[str, Any]:
    """As SGLang's, which leaves the details out where nothing was cached."""
    return {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "total_tokens": NUM_PROMPT_TOKENS + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens} if num_cached_tokens else None,
        "reasoning_tokens": 0,
    }


def _logprobs(tokens: list[str]) -> dict[str, list[Any]]:
    return {
        "tokens": tokens,
        "token_logprobs": [-0.5] * len(tokens),
        "top_logprobs": [{token: -0.5} for token in tokens],
        "text_offset": [-1] * len(tokens),
    }


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def answers(status: int, body: dict[str, Any] | None = None) -> Behaviour:
    """Answer with a status."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.Response:
        error = {"object": "error", "message": f"status {status}", "type": "x", "param": None, "code": status}
        return web.json_response(body or error, status=status, dumps=_dumps)

    return behave


async def drops(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
    """Close the connection without an answer, as a crash does."""
    request.transport.abort()
    await asyncio.sleep(3600)


async def hangs(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.Response:
    """Send nothing until aborted, as an engine call does if its counterpart never arrives."""
    await engine.abort_events[fields["rid"]].wait()
    return web.json_response(engine.answer(fields, finish_reason="abort"), dumps=_dumps)


async def in_one_write(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Stream all events at once."""
    response = await engine.stream(fields, request, 0)
    await response.write(b"".join(engine.events(fields)) + b"data: [DONE]\n\n")
    return response


def breaks_after(num_events: int) -> Behaviour:
    """Stream some events, then crash."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        await engine.stream(fields, request, num_events)
        await asyncio.sleep(0.05)  # flush what was written
        request.transport.abort()
        await asyncio.sleep(3600)

    return behave


def stops_after(num_events: int) -> Behaviour:
    """Stream some events, then send nothing more."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        await engine.stream(fields, request, num_events)
        await asyncio.sleep(3600)

    return behave


def event_gap_timeout_s(code: str) -> float:
    """A router's bound between events: short where the failure is to be seen by it, else too long to interfere."""
    return 1.5 if code == "deadline_exceeded" else 60.0


def streams(*events: bytes) -> Behaviour:
    """Stream exactly these bytes."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0.05)
        return response

    return behave


def after(delay_s: float) -> Behaviour:
    """Answer as usual after a delay."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        await asyncio.sleep(delay_s)

    return behave
