"""Bounds the bytes of all request bodies in flight, and decodes large bodies in threads, off the event loop.

One tenant's bodies may take at most half of the room: bodies count until their answers end, and other tenants' must
still be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from router.errors import TooManyBytes
from router.protocol.request_body import LARGE_BYTES, read_body

_THREADS = 2

Result = TypeVar("Result")


class BodyRoom:
    """Owned by the router; one for all its endpoints."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._held: dict[str, int] = {}  # bytes, by tenant
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="body")

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies in flight."""
        return self._num_bytes

    def share(self, tenant: str | None) -> BodyShare:
        """A share for one request, which is released at the end of its block.

        `tenant`: may take half of the room; None: the share counts for no tenant and may take the whole room.
        """
        return BodyShare(self, tenant)

    def take(self, share: BodyShare, num_bytes: int) -> None:
        """Raises TooManyBytes."""
        if self._num_bytes + num_bytes > self._most_bytes:
            raise TooManyBytes(
                f"the bodies of all requests in flight may have {self._most_bytes} bytes, and there is no room for "
                f"{num_bytes} more; try again soon"  # how much others have is none of a tenant's business
            )
        if (tenant := share.tenant) is not None and num_bytes:
            held = self._held.get(tenant, 0)
            if held > share.num_bytes and held + num_bytes > self._most_bytes // 2:  # its only body may be larger
                raise TooManyBytes(
                    f"the requests of tenant {tenant} in flight have {held} bytes of the {self._most_bytes // 2} that "
                    "are accepted of one tenant; try again soon"
                )
            self._held[tenant] = held + num_bytes
        self._num_bytes += num_bytes
        share.num_bytes += num_bytes

    def give_back(self, share: BodyShare) -> None:
        """Release all bytes that a share has taken."""
        num_bytes, share.num_bytes = share.num_bytes, 0
        self._num_bytes -= num_bytes
        if share.tenant is not None and num_bytes:
            if left := self._held[share.tenant] - num_bytes:
                self._held[share.tenant] = left
            else:
                del self._held[share.tenant]

    async def decode(self, decode: Callable[..., Result], *arguments: Any, num_bytes: int) -> Result:
        """Call `decode(*arguments)`, for a large body in a thread. It works in short steps: the event loop runs on."""
        if num_bytes <= LARGE_BYTES:
            return decode(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, decode, *arguments)

    def close(self) -> None:
        """Stop accepting work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class BodyShare:
    """The bytes that one request's body takes, until the end of the block."""

    __slots__ = ("_room", "num_bytes", "tenant")

    def __init__(self, room: BodyRoom, tenant: str | None) -> None:
        self.num_bytes = 0
        self.tenant = tenant
        self._room = room

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.give_back(self)

    async def read(
        self,
        headers: dict[bytes, bytes],
        receive: Any,
        *,
        max_bytes: int,
        timeout_s: float,
        on_bytes: Callable[[int], None],
        arrived: bytes | None = None,
    ) -> bytes:
        """As `read_body`, counting bytes as they arrive. Also raises TooManyBytes, and what `on_bytes` raises."""

        def take(num_bytes: int) -> None:
            self._room.take(self, num_bytes)
            on_bytes(num_bytes)

        return await read_body(
            headers, receive, max_bytes=max_bytes, timeout_s=timeout_s, on_bytes=take, arrived=arrived
        )
