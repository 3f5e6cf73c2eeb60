"""Reads a request's body within limits and splits it into fields, whose values stay the client's bytes.

The bytes of all bodies in flight are bounded, and large bodies are decoded in threads, off the event loop. One tenant's
bodies may take at most half of them: bodies count until their answers end, and other tenants' must still be read.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from router.errors import BodyTooLarge, BodyTooSlow, InvalidBody, RouterError, TooManyBytes

Fields = dict[str, msgspec.Raw]  # a JSON object whose values are still the client's bytes

MAX_NESTING = 100  # of arrays and objects; engines parse recursively
LARGE_BYTES = 64 * 1024  # such a body is decoded off the event loop
# What a large body may have, so that no step of decoding it holds the interpreter for long.
MAX_STRINGS = 32 * 1024  # keys and values
MAX_CONTAINERS = 64 * 1024
MAX_COMMAS = 4 * 1024**2
_STEP_BYTES = 1024**2

_fields = msgspec.json.Decoder(Fields)
_STEP = {ord(b"{"): 1, ord(b"["): 1, ord(b"}"): -1, ord(b"]"): -1}
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEP)
_NOT_OPENING = bytes(byte for byte in range(256) if byte not in b"[{")
_THREADS = 2

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection."""


async def read_body(
    headers: dict[bytes, bytes],
    receive: Any,
    *,
    max_bytes: int,
    timeout_s: float,
    on_bytes: Callable[[int], None] = lambda _: None,
    arrived: bytes | None = None,
) -> bytes:
    """Read the whole body. Raises RequestError, for a declared length over the limit before reading, or ClientGone.

    `on_bytes` is called with the size of each part that arrives; an error in it ends the reading. `arrived`: the whole
    body if it came with the headers, as most do; then nothing is awaited and no timer is needed.
    """
    given_type = headers.get(b"content-type", b"")
    if given_type != b"application/json":
        media_type = given_type.split(b";")[0].strip().lower()
        if media_type != b"application/json":
            shown = media_type.decode("latin-1") or "none"
            raise InvalidBody(f"content-type must be application/json (found {shown})")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidBody("content-encoding is not supported: send the body as it is")
    too_large = f"the body is larger than {max_bytes} bytes"
    if arrived is not None:
        if len(arrived) > max_bytes:
            raise BodyTooLarge(too_large)
        on_bytes(len(arrived))
        return arrived
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(too_large)
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
                    raise BodyTooLarge(too_large)
                on_bytes(len(chunks[-1]))
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None


def split(body: bytes, max_nesting: int = MAX_NESTING) -> Fields:
    """The fields of a JSON object. Checks encoding, syntax and depth of the whole text."""
    if len(body) > LARGE_BYTES:
        _check_density(body)
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidBody(f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    if nesting(body, max_nesting) > max_nesting:
        raise InvalidBody(f"the body is nested deeper than {max_nesting} levels")
    try:
        return _fields.decode(body)
    except msgspec.ValidationError:
        raise InvalidBody("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def _check_density(body: bytes) -> None:
    """Raises InvalidBody if a large body consists of too many small values to be a prompt.

    Counts in steps, so that other threads can run in between, and stops at the first step that exceeds a limit.
    """
    quotes = escaped = containers = commas = 0
    for start in range(0, len(body), _STEP_BYTES):
        end = start + _STEP_BYTES
        quotes += body.count(b'"', start, end)
        if quotes > 2 * MAX_STRINGS:  # perhaps in texts; a string that ends in a backslash hides one of its two quotes
            escaped += body.count(b'\\"', 0 if not escaped else start, end)
        containers += body.count(b"[", start, end) + body.count(b"{", start, end)
        commas += body.count(b",", start, end)
        _check_count("strings", (quotes - escaped) // 2, MAX_STRINGS)
        _check_count("commas", commas, MAX_COMMAS)
    if containers > MAX_CONTAINERS:
        containers = len(_outside_strings(body).translate(None, _NOT_OPENING))
        _check_count("arrays and objects", containers, MAX_CONTAINERS)


def _check_count(what: str, found: int, most: int) -> None:
    if found > most:
        raise InvalidBody(f"the body has over {most} {what}, which is the most that is accepted")


def nesting(body: bytes, max_nesting: int = MAX_NESTING) -> int:
    """The maximum depth of arrays and objects, or 0 if there are too few brackets to exceed the limit."""
    if body.count(b"[") + body.count(b"{") <= max_nesting:
        return 0
    return max(accumulate(map(_STEP.__getitem__, _outside_strings(body).translate(None, _NOT_BRACKETS))), default=0)


def _outside_strings(body: bytes) -> bytes:
    """The body without its strings, which may contain brackets."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


class Room:
    """So much of something at a time. A tenant may have half of it, or one request that takes more.

    Nothing waits for room: who gets none is refused. Everywhere, a tenant that is None is who crosses tenants: such
    requests may have all of it.
    """

    def __init__(
        self,
        most: int,
        what: str,
        error: type[RouterError],
        remedy: str = "ask for less at once",  # for a request that takes more than there is
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_held = 0
        self._most = most
        self._what = what
        self._error = error
        self._remedy = remedy
        self._on_refused = on_refused
        self._held: dict[str, int] = {}  # by tenant

    def take(self, tenant: str | None, amount: int, *, has: int = 0) -> None:
        """Take more for a request that has some, until `give_back`. Raises the error, without taking anything."""
        if has + amount > self._most:
            error = self._refused(
                f"the request takes {has + amount} {self._what}, and this router may have {self._most}: {self._remedy}"
            )
            error.retryable = False
            raise error
        if self.num_held + amount > self._most:  # how much others have is none of a tenant's business
            raise self._refused(
                f"this router may have {self._most} {self._what} at a time, too few for {amount} more now; try again "
                "soon"
            )
        if tenant is not None and amount:
            held = self._held.get(tenant, 0)
            if held > has and held + amount > self._most // 2:
                raise self._refused(
                    f"the requests of tenant {tenant} in flight have {held} {self._what}; with {amount} more they are "
                    f"more than the {self._most // 2} that one tenant may have: try again soon"
                )
            self._held[tenant] = held + amount
        self.num_held += amount

    def give_back(self, tenant: str | None, amount: int) -> None:
        """Release what `take` has taken."""
        self.num_held -= amount
        if tenant is not None and amount:
            if left := self._held[tenant] - amount:
                self._held[tenant] = left
            else:
                del self._held[tenant]

    @contextmanager
    def held(self, tenant: str | None, amount: int) -> Iterator[None]:
        """Have room inside the block."""
        with self.growing(tenant) as take:
            take(amount)
            yield

    @contextmanager
    def growing(self, tenant: str | None) -> Iterator[Callable[[int], None]]:
        """Have ever more room inside the block: the yielded function takes it. It raises the error."""
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            self.take(tenant, amount, has=held)
            held += amount

        try:
            yield take
        finally:
            self.give_back(tenant, held)

    def _refused(self, why: str) -> RouterError:
        self._on_refused()
        return self._error(why)


class BodyBudget:
    """Owned by the router; one for all its endpoints."""

    def __init__(self, most_bytes: int) -> None:
        self.room = Room(most_bytes, "bytes of requests' bodies", TooManyBytes, "send less at once")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="body")

    async def decode(self, decode: Callable[..., Result], *arguments: Any, num_bytes: int) -> Result:
        """Call `decode(*arguments)`, for a large body in a thread. It works in short steps: the event loop runs on."""
        if num_bytes <= LARGE_BYTES:
            return decode(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, decode, *arguments)

    def close(self) -> None:
        """Stop accepting work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
