"""Bodies on the wire: bounded also when inflated, JSON or protobuf."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import zstandard
from google.protobuf.message import DecodeError, Message
from starlette.requests import ClientDisconnect, Request

from training.executor.operations import Scored
from training.service import tinker_pb2 as pb
from training.service.errors import Refused, TooLarge

PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 16 * 1024**2  # of data, as received, and inflated; the SDK keeps chunks below 5 MB
MAX_JSON_BYTES = 1024**2
_MAX_WINDOW_BYTES = MAX_BODY_BYTES  # memory that zstd takes
_MAX_PARTS = 2**18  # of a body: fields, and those of its data
_BODY_TIMEOUT_S = 60.0

# (tokens, log-probabilities if there are any, whether it ended by itself)
Samples = Sequence[tuple[Sequence[int], Sequence[float | None] | None, bool]]


async def body_of(request: Request, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Raises TooLarge and Refused."""
    received = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                received += part
                if len(received) > max_bytes:
                    raise TooLarge(f"the body has more than {max_bytes} bytes; send less at a time")
    except (TimeoutError, ClientDisconnect):
        raise Refused(f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
    match request.headers.get("content-encoding", "identity"):
        case "identity":
            return bytes(received)
        case "zstd":
            return await asyncio.to_thread(inflated, bytes(received), max_bytes)
        case other:
            raise Refused(f"content-encoding is {other[:40]!r}; zstd and identity are read")


def inflated(body: bytes, max_bytes: int) -> bytes:
    """What zstd has compressed, in one frame that says its size, as the SDK's does. Raises TooLarge and Refused."""
    try:
        frame = zstandard.get_frame_parameters(body)
        if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN or frame.window_size > _MAX_WINDOW_BYTES:
            raise Refused(f"the zstd frame must say its content's size, with a window of up to {_MAX_WINDOW_BYTES}")
        if frame.content_size > max_bytes:
            raise TooLarge(f"the body has more than {max_bytes} bytes when inflated; send less data at a time")
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused(f"the body is not zstd: {error}") from None


def parsed_request(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises Refused."""
    _check_num_parts(body)
    request = pb.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, RuntimeError) as error:
        raise Refused(f"the body is no ForwardBackwardRequest: {error}") from None
    return request


def _check_num_parts(body: bytes) -> None:
    """Raise Refused for very many parts: parsed, empty ones take 30 times their bytes, and no other thread runs."""
    num_parts = 0
    for number, content in _fields(memoryview(body)):
        inner = _fields(content) if number == pb.ForwardBackwardRequest.DATA_FIELD_NUMBER else ()
        num_parts += 1 + sum(1 for _ in islice(inner, _MAX_PARTS))
        if num_parts > _MAX_PARTS:
            raise Refused(f"the body has more than {_MAX_PARTS} datums, chunks, inputs and spans; send less at a time")


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The number of each field of a protobuf message, and its content if that is a message. Raises Refused."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind, size = tag & 7, 0
        if kind in (0, 2):
            size, at = _varint(message, at)
        if kind not in (0, 1, 2, 5):
            raise Refused(f"the body is no ForwardBackwardRequest: it has a field of wire type {kind}")
        end = at + {0: 0, 1: 8, 2: size, 5: 4}[kind]
        yield tag >> 3, message[at : end if kind == 2 else at]
        at = end


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise Refused("the body is no ForwardBackwardRequest: it has a number that does not end")


def check_no_unknown_field(message: Message) -> None:
    """Raise Refused for what a newer client has: it must not be dropped silently."""
    size = message.ByteSize()
    message.DiscardUnknownFields()  # in all that is within, too
    if unknown := size - message.ByteSize():
        raise Refused(f"the {message.DESCRIPTOR.name} has {unknown} bytes of fields unknown here; use an older SDK")


def scored_body(scored: Scored) -> bytes:
    """A ForwardBackwardOutput."""
    lengths = [len(each) for each in scored.logprobs]
    logprobs = pb.BatchedTensor(
        data=b"".join(scored.logprobs), offsets=np.cumsum([0, *lengths], dtype=np.int64).tobytes()
    )
    logprobs.dtype = pb.DTYPE_FLOAT32
    record = pb.ArrayRecord(num_datums=len(lengths), fields={"logprobs": logprobs})
    return pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": scored.loss_sum}
    ).SerializeToString()


def samples_body(sequences: Samples, of_prompt: Sequence[float] | None = None) -> bytes:
    """A SampleResponse. `of_prompt`: log-probabilities of the prompt's tokens, if they were asked for."""
    response = pb.SampleResponse(
        prompt_logprobs=None if of_prompt is None else np.array(of_prompt, np.float32).tobytes()
    )
    for tokens, logprobs, has_stopped in sequences:
        response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if has_stopped else pb.STOP_REASON_LENGTH,
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=None if logprobs is None else np.array(logprobs, np.float32).tobytes(),
        )
    return response.SerializeToString()
