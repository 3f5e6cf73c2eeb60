"""The client's own deadline for a whole answer: the header `x-prelude-timeout`, in seconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from router.errors import DeadlineExceeded, InvalidField

HEADER = "x-prelude-timeout"
_HEADER = HEADER.encode()
_MAX_S = 86_400.0
_NO_DEADLINE = nullcontext()


def client_deadline(headers: Mapping[bytes, bytes], age_s: float) -> AbstractAsyncContextManager[None]:
    """End what runs inside, its engine calls too, when the deadline has passed. `age_s`: of the request.

    Raises DeadlineExceeded then, and InvalidField for a value that is no number of seconds.
    """
    given = headers.get(_HEADER)
    return _NO_DEADLINE if given is None else _limited(given, age_s)


@asynccontextmanager
async def _limited(given: bytes, age_s: float) -> AsyncIterator[None]:
    timeout_s = _seconds(given)
    try:
        async with asyncio.timeout(timeout_s - age_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the answer was not complete within {timeout_s:g} s, the request's {HEADER}") from None


def _seconds(given: bytes) -> float:
    try:
        seconds = float(given) if len(given) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_S:
        shown = given[:32].decode("latin-1")
        raise InvalidField(f"{HEADER} must be a number of seconds over 0 and up to {_MAX_S:g} (found {shown!r})")
    return seconds
