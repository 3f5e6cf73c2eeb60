"""Handlers of gRPC calls that check the call, or each of its requests, before the original handler sees it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc


async def _accept(*_: Any) -> None:
    """A check that accepts everything."""


def checked_handler(
    handler: grpc.RpcMethodHandler,
    *,
    check_call: Callable[[Any], Awaitable[None]] = _accept,
    check_request: Callable[[Any, Any], Awaitable[None]] = _accept,
    decode: Callable[[bytes], Any] | None = None,
) -> grpc.RpcMethodHandler:
    """The handler with checks, which abort what they refuse.

    `check_call` gets the context, once; `check_request` each request and the context. `decode` replaces the handler's
    own decoder. Raises NotImplementedError for a call that streams both ways.
    """

    async def check_both(request: Any, context: Any) -> None:
        await check_call(context)
        await check_request(request, context)

    codec = {
        "request_deserializer": decode or handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(_after(handler.unary_unary, check_both), **codec)
    if handler.unary_stream is not None:
        # One that is no generator writes its responses to the context.
        after = _generating_after if inspect.isasyncgenfunction(handler.unary_stream) else _after
        return grpc.unary_stream_rpc_method_handler(after(handler.unary_stream, check_both), **codec)
    if handler.stream_unary is None:
        raise NotImplementedError("calls that stream both ways have no checks")

    async def receive(requests: AsyncIterator[Any], context: Any) -> Any:
        async def each() -> AsyncIterator[Any]:
            async for request in requests:
                await check_request(request, context)
                yield request

        await check_call(context)
        return await handler.stream_unary(each(), context)

    return grpc.stream_unary_rpc_method_handler(receive, **codec)


def _after(behavior: Any, check: Callable[[Any, Any], Awaitable[None]]) -> Any:
    async def call(request: Any, context: Any) -> Any:
        await check(request, context)
        return await behavior(request, context)

    return call


def _generating_after(behavior: Any, check: Callable[[Any, Any], Awaitable[None]]) -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(request, context)
        async with contextlib.aclosing(behavior(request, context)) as responses:
            async for response in responses:
                yield response

    return call
