"""The client's own deadline for a whole answer: the header `x-prelude-timeout`, in seconds."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from router.errors import DeadlineExceeded, InvalidField

_NAME = "x-prelude-timeout"
_HEADER = _NAME.encode()
_MAX_S = 86_400.0
_NO_DEADLINE = nullcontext()


def client_deadline(headers: Mapping[bytes, bytes], started_at: float) -> AbstractAsyncContextManager[None]:
    """Cancel the block, including its engine calls, when the client's deadline has passed.

    `started_at`: of the request, by `time.monotonic`. Raises DeadlineExceeded at the deadline, and InvalidField if the
    header's value is not a number of seconds.
    """
    given = headers.get(_HEADER)
    return _NO_DEADLINE if given is None else _deadline(given, started_at)


@asynccontextmanager
async def _deadline(given: bytes, started_at: float) -> AsyncIterator[None]:
    timeout_s = _seconds(given)
    try:
        async with asyncio.timeout(started_at + timeout_s - time.monotonic()) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the answer was not complete within {timeout_s:g} s, the request's {_NAME}") from None


def _seconds(given: bytes) -> float:
    try:
        seconds = float(given) if len(given) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_S:
        shown = given[:32].decode("latin-1")
        raise InvalidField(f"{_NAME} must be a number of seconds over 0 and up to {_MAX_S:g} (found {shown!r})")
    return seconds
