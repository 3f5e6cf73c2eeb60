"""Checks calls to an agent before their handlers see them: who may make them, and the bounds of each request."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from cluster.control.authorization import check_caller
from cluster.control.bounds import out_of_bounds
from process.certificates.identity import Identity

_DISCARD_S = 2.0  # less than the margin for which callers outwait a deadline


class CheckedCalls(grpc.aio.ServerInterceptor):
    """Aborts the calls that it refuses."""

    def __init__(self, identity: Identity | None) -> None:
        """`identity`: the agent's own, by which it checks callers; None without `tls`."""
        self._identity = identity

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        codec = {
            "request_deserializer": _decoded_by(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }

        async def check_call(context: Any) -> None:
            if self._identity is not None:
                await check_caller(context, method, self._identity)

        async def call(request: Any, context: Any) -> Any:
            await check_call(context)
            await _check_request(request, context)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await check_call(context)
            await _check_request(request, context)
            async with contextlib.aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    yield response

        async def receive(requests: AsyncIterator[Any], context: Any) -> Any:
            async def each() -> AsyncIterator[Any]:
                async for request in requests:
                    await _check_request(request, context, unread=requests)
                    yield request

            await check_call(context)
            return await handler.stream_unary(each(), context)

        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(call, **codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(stream, **codec)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(receive, **codec)
        raise NotImplementedError("calls that stream both ways have no checks")


def _decoded_by(decode: Callable[[bytes], Message]) -> Callable[[bytes], Message | None]:
    """Decodes malformed messages to None, for which gRPC itself would log a traceback and answer UNKNOWN."""

    def decoded(data: bytes) -> Message | None:
        try:
            return decode(data)
        except DecodeError:
            return None

    return decoded


async def _check_request(request: Message | None, context: Any, unread: AsyncIterable[Any] | None = None) -> None:
    problem = "the request is no message of its kind" if request is None else out_of_bounds(request)
    if problem is not None:
        if unread is not None:
            await discard(unread)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)


async def discard(requests: AsyncIterable[Any]) -> None:
    """Read what the caller still sends. If a call ends before that, its caller may see an internal error instead.

    https://github.com/grpc/grpc/issues/36066
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for _ in requests:
                pass
