"""One process of the generator, which sends every n-th session. Used alone, or as `python -m bench.load.process`.

The parent writes a Job as one line of JSON, reads `ready`, writes the start as a line, and reads Progress until the
Share comes.
"""

import asyncio
import contextlib
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import uvloop

from bench.load.client import Client
from bench.load.loops import Loop
from bench.load.options import Load
from bench.load.record import Record
from bench.workloads.session import Session
from bench.workloads.workload import Stream
from process.lifetime import die_with_parent

_PROGRESS_EVERY_S = 0.5


class Job(msgspec.Struct, frozen=True):
    load: Load
    index: int = 0  # of this process
    num_processes: int = 1


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What one process has done so far."""

    num_done: int
    num_failed: int
    num_in_flight: int
    num_tokens: int


class Share(msgspec.Struct, frozen=True, tag=True):
    """What one process did in all."""

    records: list[Record]
    cpu_s: float
    is_stopped: bool  # by SIGINT, before its end


def sessions_of(job: Job, stream: Stream) -> Iterator[Session]:
    """The sessions that this process sends, each made when it is asked for."""
    load = job.load
    count = load.num_requests
    if count is None and load.duration_s is None:
        count = load.workload.num_requests
    return stream.sessions(count, job.index, job.num_processes)


async def run_share(job: Job, stream: Stream, start_at: float, report: Callable[[Progress], None]) -> Share:
    """Send the sessions of this process; the load starts when time.monotonic() is `start_at`. Raises BenchError.

    `stream` is the load's: making it may take long, so it is made before the start is known.
    """
    load = job.load

    def now() -> float:
        return time.monotonic() - start_at

    _allow_many_connections()
    began_cpu_s = time.process_time()
    async with Client(load.endpoint, now) as client:
        loop = Loop(client.send, now, load.duration_s)
        reporting = asyncio.create_task(_report(loop, report))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, _stop, loop, asyncio.current_task())
        try:
            sessions = sessions_of(job, stream)
            if load.is_open:
                due = islice(load.due_s(), job.index, None, job.num_processes)
                await loop.open(zip(sessions, due, strict=False))
            else:
                await asyncio.sleep(max(0.0, -now()))
                await loop.closed(sessions, _share_of(load.concurrency, job))
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting
    return Share(loop.records, time.process_time() - began_cpu_s, loop.is_stopped)


def _stop(loop: Loop, task: asyncio.Task[Any] | None) -> None:
    """The first Ctrl-C waits for what is in flight; the second does not."""
    if loop.is_stopped and task is not None:
        task.cancel()
    loop.stop()


def _allow_many_connections() -> None:
    """Each request in flight needs a descriptor; too few would look like an endpoint that is not reachable."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _share_of(concurrency: int | None, job: Job) -> int:
    """At least one: there are no more processes than that."""
    assert concurrency
    return concurrency // job.num_processes + (job.index < concurrency % job.num_processes)


async def _report(loop: Loop, report: Callable[[Progress], None]) -> None:
    num_seen = num_failed = num_tokens = 0
    while True:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        for record in loop.records[num_seen:]:
            num_failed += record.error is not None
            num_tokens += record.output_tokens
        num_seen = len(loop.records)
        report(Progress(num_seen, num_failed, loop.num_in_flight, num_tokens))


def main() -> None:
    """The child's side of the protocol above."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    stream = job.load.stream()
    # With PYTHONUNBUFFERED, sys.stdout drops what a pipe does not take at once.
    with open(sys.stdout.fileno(), "wb", closefd=False) as parent:

        def send(line: bytes) -> None:
            parent.write(line + b"\n")
            parent.flush()

        def report(message: Progress | Share) -> None:
            send(msgspec.json.encode(message))

        send(b"ready")
        start_at = float(sys.stdin.readline())
        report(uvloop.run(run_share(job, stream, start_at, report)))


if __name__ == "__main__":
    die_with_parent()
    main()
