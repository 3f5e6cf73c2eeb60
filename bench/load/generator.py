"""Runs a load in one process or several and merges what they recorded."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from bench.errors import BenchError
from bench.load.options import Load
from bench.load.process import Job, Progress, Share, run_share
from bench.load.record import Record
from bench.workloads.lengths import PhasedLengths

_EVENTS_PER_S = 4000.0  # of one process, with a margin: it takes 18,000 to 44,000 events per second of CPU time
_READY_WITHIN_S = 120.0
_START_MARGIN_S = 0.2
_MAX_LINE = 2**31  # of a child's answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """All records of a load, in the order of the intended times, and what generating it cost."""

    records: tuple[Record, ...]
    cpu_s: float
    num_processes: int
    is_stopped: bool = False  # by Ctrl-C, before its end


def processes_for(load: Load) -> int:
    """How many processes a load needs: known for an open loop of single requests, one otherwise."""
    if load.requests_per_s is None or load.workload.is_chat:
        return 1
    lengths = load.workload.lengths
    if isinstance(lengths, PhasedLengths):
        events_per_s = max(each.requests_per_s * each.output for each in lengths.phases)
    else:
        tokens = [session.requests[0].max_tokens for session in load.stream().sessions(64)]
        events_per_s = load.requests_per_s * sum(tokens) / len(tokens)
    return max(1, min(len(os.sched_getaffinity(0)), math.ceil(events_per_s / _EVENTS_PER_S)))


async def generate(
    load: Load, progress: Callable[[Progress], None] = lambda _progress: None, *, is_apart: bool = False
) -> Outcome:
    """Run the load; `progress` gets the sum over the processes. Raises BenchError.

    One process is this one, unless it has other things to do and the load is to be apart from it.
    """
    count = load.processes
    stream = load.stream()  # before the clock starts; other processes make their own, and this one finds what is wrong
    if count == 1 and not is_apart:
        share = await run_share(Job(load), stream, time.monotonic() + _START_MARGIN_S, progress)
        return _merged([share])
    latest: dict[int, Progress] = {}

    def heard(index: int, message: Progress) -> None:
        latest[index] = message
        progress(_sum(list(latest.values())))

    async with contextlib.AsyncExitStack() as stack:
        children = [await stack.enter_async_context(_child(Job(load, index, count))) for index in range(count)]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, _interrupt, children)
        stack.callback(loop.remove_signal_handler, signal.SIGINT)
        start_at = time.monotonic() + _START_MARGIN_S
        shares = await asyncio.gather(
            *(_share(child, start_at, partial(heard, index)) for index, child in enumerate(children))
        )
    return _merged(shares)


def _interrupt(children: list[asyncio.subprocess.Process]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGINT)


def _merged(shares: list[Share]) -> Outcome:
    records = [record for share in shares for record in share.records]
    records.sort(key=lambda each: (each.intended_s, each.session, each.turn))
    return Outcome(
        tuple(records), sum(share.cpu_s for share in shares), len(shares), any(share.is_stopped for share in shares)
    )


def _sum(told: list[Progress]) -> Progress:
    return Progress(
        sum(each.num_done for each in told),
        sum(each.num_failed for each in told),
        sum(each.num_in_flight for each in told),
        sum(each.num_tokens for each in told),
    )


@contextlib.asynccontextmanager
async def _child(job: Job) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ready to start. It is killed at the end."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.load.process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE,
        start_new_session=True,  # Ctrl-C is for the parent, which passes it on
    )
    try:
        reader, writer = _pipes(child)
        writer.write(msgspec.json.encode(job) + b"\n")
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                line = await reader.readline()
        except TimeoutError:
            line = b""
        if line != b"ready\n":
            raise BenchError(f"process {job.index} of the load generator did not start")
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _pipes(child: asyncio.subprocess.Process) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert child.stdout is not None
    assert child.stdin is not None
    return child.stdout, child.stdin


async def _share(child: asyncio.subprocess.Process, start_at: float, heard: Callable[[Progress], None]) -> Share:
    reader, writer = _pipes(child)
    writer.write(b"%r\n" % start_at)
    decoder = msgspec.json.Decoder(Progress | Share)
    while (line := await reader.readline()).endswith(b"\n"):
        message = decoder.decode(line)
        if isinstance(message, Share):
            return message
        heard(message)
    raise BenchError("a process of the load generator ended before its load did")
