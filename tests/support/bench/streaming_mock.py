"""A server of OpenAI-compatible streams with known delays and faults: what a load generator measures in its tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from support.routers.served_routes import served

Answer = Callable[["MockServer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(text: str = " word", finish: str | None = None, is_chat: bool = False) -> bytes:
    """One event with a token, as SGLang sends it."""
    body = {"delta": {"content": text}} if is_chat else {"text": text}
    choice = {"index": 0, **body, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    found = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return b"data: " + json.dumps({"choices": [], "usage": found}).encode() + b"\n\n"


async def stream_of(request: web.Request) -> web.StreamResponse:
    """An answer whose stream has begun."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def stream(server: MockServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Every token asked for: the first one after `first_s`, the others `gap_s` apart."""
    response = await stream_of(request)
    is_chat = request.path.endswith("chat/completions")
    for number in range(body["max_tokens"]):
        await asyncio.sleep(server.gap_s if number else server.first_s)
        await response.write(event(is_chat=is_chat))
    await response.write(usage(len(body.get("prompt", ())), body["max_tokens"]) + b"data: [DONE]\n\n")
    return response


@dataclass
class MockServer:
    """Answers completions with `answer`; keeps the bodies."""

    answer: Answer = stream
    first_s: float = 0.0
    gap_s: float = 0.0
    model: dict[str, str] = field(default_factory=lambda: {"id": "mock", "owned_by": "prelude"})
    adapters: tuple[str, ...] = ("a0", "a1", "a2", "a3")
    page: int = 3  # models
    refusal: int = 0  # status of /v1/models
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self.answer(self, request, self.bodies[-1])

    async def _models(self, request: web.Request) -> web.Response:
        if self.refusal:
            return web.json_response({"error": {"message": "no key"}}, status=self.refusal)
        cards = [{"id": name, "owned_by": "prelude", "parent": "mock"} for name in self.adapters]
        names = [self.model["id"], *self.adapters]
        start = names.index(request.query["after"]) + 1 if "after" in request.query else 0
        page = [self.model, *cards][start : start + self.page]
        return web.json_response(
            {"data": page, "has_more": start + self.page < len(names), "last_id": page[-1]["id"] if page else ""}
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[MockServer]:
        """Serve at `url` on this event loop, on any free port."""
        completions = [web.post(f"/v1/{path}", self._complete) for path in ("completions", "chat/completions")]
        async with served([*completions, web.get("/v1/models", self._models)]) as self.url:
            yield self
