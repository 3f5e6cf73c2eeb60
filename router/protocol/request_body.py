"""Reads a request's body within limits and splits it into fields, whose values stay the client's bytes."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any

import msgspec

from router.errors import BodyTooLarge, BodyTooSlow, InvalidBody

Fields = dict[str, msgspec.Raw]  # a JSON object whose values are still the client's bytes

MAX_NESTING = 100  # of arrays and objects; engines parse recursively

_fields = msgspec.json.Decoder(Fields)
_STEP = {ord(b"{"): 1, ord(b"["): 1, ord(b"}"): -1, ord(b"]"): -1}
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEP)


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(headers: dict[bytes, bytes], receive: Any, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read the whole body. Raises RequestError, for a declared length over the limit before reading, or ClientGone."""
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if media_type != b"application/json":
        shown = media_type.decode("latin-1") or "none"
        raise InvalidBody(f"content-type must be application/json (found {shown})")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidBody("content-encoding is not supported: send the body as it is")
    too_large = BodyTooLarge(f"the body is larger than {max_bytes} bytes")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None


def split(body: bytes) -> Fields:
    """The fields of a JSON object. Checks encoding, syntax and depth of the whole text."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidBody(f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    if nesting(body) > MAX_NESTING:
        raise InvalidBody(f"the body is nested deeper than {MAX_NESTING} levels")
    try:
        return _fields.decode(body)
    except msgspec.ValidationError:
        raise InvalidBody("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def nesting(body: bytes) -> int:
    """The maximum depth of arrays and objects, or 0 if there are too few brackets to exceed the limit."""
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return 0
    return max(accumulate(map(_STEP.__getitem__, _outside_strings(body).translate(None, _NOT_BRACKETS))), default=0)


def _outside_strings(body: bytes) -> bytes:
    """The body without its strings, which may contain brackets."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])
