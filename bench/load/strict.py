"""Loads of benchmarks that report nothing after a failure: the loops and records of `prelude bench load`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

from bench.errors import SystemFailed
from bench.load.client import Client
from bench.load.loops import Loop, Send
from bench.load.options import Endpoint
from bench.load.record import Record
from bench.load.summary import duration_s
from bench.workloads.session import Request, Session

Now = Callable[[], float]


def stopwatch() -> Now:
    """A clock in seconds that starts at 0."""
    began_at = time.perf_counter()
    return lambda: time.perf_counter() - began_at


async def closed(send: Send, sessions: Iterable[Session], concurrency: int, now: Now) -> list[Record]:
    """Keep so many sessions going. Raises what `send` raises, or SystemFailed for the first failed request."""
    loop = Loop(_strictly(send), now)
    await _whole(loop.closed(iter(sessions), concurrency))
    return loop.records


async def closed_load(endpoint: Endpoint, sessions: Iterable[Session], concurrency: int) -> list[Record]:
    """The same through the streaming client."""
    now = stopwatch()
    async with Client(endpoint, now) as client:
        return await closed(client.send, sessions, concurrency, now)


async def open_load(endpoint: Endpoint, due: Iterable[tuple[Session, float]]) -> list[Record]:
    """Start each session when it is due, whatever became of the ones before. Raises SystemFailed."""
    now = stopwatch()
    async with Client(endpoint, now) as client:
        loop = Loop(_strictly(client.send), now)
        await _whole(loop.open(due))
        return loop.records


def requests_per_s(records: list[Record]) -> float:
    """Until the last answer, so that the tail of a slow batch counts."""
    return len(records) / duration_s(records)


def _strictly(send: Send) -> Send:
    async def sent(request: Request, adapter: int | None, intended_s: float, session: int, turn: int) -> Record:
        record = await send(request, adapter, intended_s, session, turn)
        if record.error is not None:
            status = "" if record.status is None else f" (status {record.status})"
            raise SystemFailed(f"a request for {record.adapter or 'the base model'}: {record.detail}{status}")
        return record

    return sent


async def _whole(loop: Awaitable[None]) -> None:
    """Wait for the load; one failure ends it, and is raised by itself."""
    try:
        await loop
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
