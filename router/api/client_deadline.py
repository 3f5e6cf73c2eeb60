"""The client's own deadline for a whole answer: the header `x-prelude-timeout`, in seconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.errors import DeadlineExceeded, InvalidField

_NAME = "x-prelude-timeout"
HEADER = _NAME.encode()
_MAX_S = 86_400.0


@asynccontextmanager
async def client_deadline(given: bytes, age_s: float) -> AsyncIterator[None]:
    """Cancel the block, including its engine calls, when the client's deadline has passed.

    `given`: the header's value; `age_s`: the request's age. Raises DeadlineExceeded at the deadline, and InvalidField
    if the value is not a number of seconds.
    """
    timeout_s = _seconds(given)
    try:
        async with asyncio.timeout(timeout_s - age_s) as limit:
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
