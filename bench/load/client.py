"""Sends requests to an OpenAI-compatible endpoint and records their outcomes. Failures are recorded, not raised."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from bench.errors import BenchError, SystemFailed
from bench.load.events import EventStream, MalformedStream, error_text
from bench.load.options import Endpoint, Engine
from bench.load.record import (
    ERROR_ANSWER,
    ERROR_EVENT,
    MALFORMED,
    TIMED_OUT,
    TRUNCATED,
    UNREACHABLE,
    Record,
)
from bench.workloads.session import Request

_KEEP_ALIVE_S = 1.0  # below the servers' timeouts: reusing a connection that the server just closed is an error
_MAX_ERROR_BYTES = 4096
_DIGITS = 6  # of times in seconds
_MAX_MODELS_BYTES = 8 * 1024**2  # of a page
_ASK_TIMEOUT_S = 10.0
_MAX_SHOWN = 200  # bytes


Receive = Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]]


class _Failed(Exception):
    def __init__(self, kind: str, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.status = kind, detail, status


class Client:
    """An async context manager; as many requests at a time as are started."""

    def __init__(self, endpoint: Endpoint, now: Callable[[], float]) -> None:
        """`now` gives the seconds since the start of the load."""
        self._endpoint = endpoint
        self._now = now
        # Events are read as they come, so no proxy may compress them; aiohttp would offer that it may.
        self._headers = {"content-type": "application/json", "accept-encoding": "identity", **endpoint.headers}

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, request: Request, adapter: int | None, intended_s: float, session: int, turn: int) -> Record:
        """Send one request and read its answer to the end."""
        stream = EventStream()
        sent_s = self._now()
        kind: str | None = None
        detail, status = "", None
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                await self._exchange(self._endpoint.engine_of(session), request, adapter, partial(self._stream, stream))
        except TimeoutError:
            kind, detail = TIMED_OUT, f"no end within {self._endpoint.timeout_s:g} s"
        except _Failed as failed:
            kind, detail, status = failed.kind, failed.detail, failed.status
        except MalformedStream as malformed:
            kind, detail = MALFORMED, str(malformed)
        except (aiohttp.ClientPayloadError, ConnectionResetError) as error:
            kind, detail = TRUNCATED, error_text(str(error) or type(error).__name__)
        except (aiohttp.ClientError, OSError) as error:
            # A connection that ends after the head of an answer is a ClientPayloadError, so this one never answered.
            kind, detail = UNREACHABLE, error_text(str(error) or type(error).__name__)
        return Record(
            session=session,
            turn=turn,
            adapter=None if adapter is None else self._endpoint.adapters[adapter],
            intended_s=round(intended_s, _DIGITS),
            sent_s=round(sent_s, _DIGITS),
            end_s=round(self._now(), _DIGITS),
            token_s=tuple(round(each, _DIGITS) for each in stream.token_s),
            prompt_tokens=request.prompt_tokens if stream.prompt_tokens is None else stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            output_tokens=stream.output_tokens,
            max_tokens=request.max_tokens,
            error=kind,
            status=status,
            detail=detail,
        )

    async def complete(self, request: Request, adapter: int | None) -> dict[str, Any]:
        """The answer as a whole, not streamed. Raises SystemFailed: there is no record that a failure could be in."""
        engine = self._endpoint.engine_of(0)
        answers: list[bytes] = []

        async def receive(url: str, body: dict[str, Any]) -> None:
            answers.append(await self._whole(url, body))

        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                await self._exchange(engine, request, adapter, receive)
        except _Failed as failed:
            raise SystemFailed(f"{engine.url}: {failed.detail} (status {failed.status})") from failed
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SystemFailed(f"{engine.url}: {error or type(error).__name__}") from error
        try:
            return msgspec.json.decode(answers[0])
        except msgspec.DecodeError as error:
            raise SystemFailed(f"{engine.url}: {error}: {answers[0][:_MAX_SHOWN]!r}") from error

    async def _exchange(self, engine: Engine, request: Request, adapter: int | None, receive: Receive) -> None:
        """Send a request to an engine, or to both of a pair; `receive` gets the answer from a URL and a body."""
        body = fields_of(self._endpoint, request, adapter)
        if engine.prefill is None:
            await receive(engine.url + request.path, body)
            return
        of_decode = body if engine.decode_has_adapters else fields_of(self._endpoint, request, None)
        meeting = {
            "bootstrap_host": engine.prefill.kv_host,
            "bootstrap_port": engine.prefill.kv_port,
            "bootstrap_room": secrets.randbits(63),
        }
        try:
            async with asyncio.TaskGroup() as group:  # an error of one ends the other
                # Its answer has nothing that the decode engine's has not.
                prompt_read = self._whole(engine.prefill.url + request.path, body | meeting, "prefill: ")
                group.create_task(prompt_read, name="prefill")
                group.create_task(receive(engine.url + request.path, of_decode | meeting), name="decode")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _whole(self, url: str, body: dict[str, Any], whose: str = "") -> bytes:
        body = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
        async with self._post(url, body) as answer:
            if answer.status != 200:
                raise _Failed(ERROR_ANSWER, whose + await _error_detail(answer), answer.status)
            return await answer.read()

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        return self._session.post(url, data=msgspec.json.encode(body), headers=self._headers)

    async def _stream(self, stream: EventStream, url: str, body: dict[str, Any]) -> None:
        async with self._post(url, body) as answer:
            if answer.status != 200:
                raise _Failed(ERROR_ANSWER, await _error_detail(answer), answer.status)
            if answer.content_type != "text/event-stream":
                raise _Failed(MALFORMED, f"content-type {answer.content_type!r} in place of an event stream", 200)
            async for data in answer.content.iter_any():
                stream.feed(data, self._now())
                if stream.error is not None:
                    raise _Failed(ERROR_EVENT, stream.error, 200)
        if not stream.is_done:
            raise _Failed(TRUNCATED, f"no [DONE] after {len(stream.token_s)} events", 200)
        if not stream.token_s:
            raise _Failed(TRUNCATED, "no token before [DONE]", 200)


def fields_of(endpoint: Endpoint, request: Request, adapter: int | None) -> dict[str, Any]:
    """The body of a request. Equal arguments give equal fields in the same order."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        **request.content,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.ignore_eos:
        body["ignore_eos"] = True
    if adapter is not None and endpoint.adapter_field != "none":
        body[endpoint.adapter_field] = endpoint.adapters[adapter]
    return body | endpoint.extra_body


async def _error_detail(answer: aiohttp.ClientResponse) -> str:
    text = await answer.content.read(_MAX_ERROR_BYTES)
    try:
        error = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return error_text(text.decode(errors="replace"))
    return error_text(error.get("error") or error if isinstance(error, dict) else error)


class Served(msgspec.Struct, frozen=True):
    """What an endpoint says about itself."""

    model: str
    server: str  # `owned_by`: "prelude", "sglang", "vllm", …
    adapters: tuple[str, ...]
    next_after: str  # where the next page begins; empty: this was the last one


async def ask_models(url: str, headers: dict[str, str], num_adapters: int = 0) -> Served:
    """What /v1/models says, page by page until it has listed so many adapters. Raises BenchError."""
    timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            served = await _models_page(session, url)
            while len(served.adapters) < num_adapters and served.next_after:
                page = await _models_page(session, url, after=served.next_after)
                next_after = page.next_after if page.adapters else ""
                served = Served(served.model, served.server, served.adapters + page.adapters, next_after)
            return served
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        problem = str(error) or type(error).__name__
        is_unreached = isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError)
        hint = " Is it running? --model skips this question." if is_unreached else ""
        raise BenchError(f"{url}: {problem}.{hint}") from error


async def _models_page(session: aiohttp.ClientSession, url: str, **query: str) -> Served:
    async with session.get(f"{url}/v1/models", params=query) as answer:
        if answer.status != 200:
            raise BenchError(f"{url}: /v1/models answered {answer.status}: {await _error_detail(answer)}")
        text = await answer.content.read(_MAX_MODELS_BYTES)
    try:
        page = msgspec.json.decode(text)
        first = page["data"][0]
        return Served(
            # Whoever may not use the base model sees adapters only.
            str(first.get("parent") or first["id"]),
            str(first.get("owned_by", "")),
            tuple(str(each["id"]) for each in page["data"] if each.get("parent")),
            str(page.get("last_id") or "") if page.get("has_more") else "",
        )
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise BenchError(f"{url}/v1/models is no list of models: {text[:200]!r}; name one with --model") from error
