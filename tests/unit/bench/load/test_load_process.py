"""One process of the load generator and its parent: nothing of its answer is lost, and its end is an error."""

import array
import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import msgspec
import pytest
from support.waiting import wait_until

from bench.errors import BenchError
from bench.load.generator import generate
from bench.load.options import Endpoint, Load
from bench.load.process import Job, Progress, Share
from bench.workloads import catalog

NUM_REQUESTS = 2_000


def load(num_requests: int, **settings) -> Load:
    """Requests to nobody: each fails at once."""
    endpoint = Endpoint("http://127.0.0.1:9", "m", (), "none")
    return Load(endpoint, catalog.WORKLOADS["random"], num_requests=num_requests, **settings)


def unread(pipe: IO[bytes]) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_answer_that_is_written_in_parts_comes_whole():
    """A process that is stopped and continued while it writes to a full pipe has written a part.

    With PYTHONUNBUFFERED, `sys.stdout` would drop the rest.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.load.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with child:
        assert child.stdin
        assert child.stdout
        capacity = fcntl.fcntl(child.stdout, fcntl.F_GETPIPE_SZ)
        child.stdin.write(msgspec.json.encode(Job(load(NUM_REQUESTS, concurrency=16))) + b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"ready\n"
        child.stdin.write(b"0.0\n")
        child.stdin.flush()
        wait_until(lambda: unread(child.stdout) > capacity // 2 and state_of(child.pid) == "S")
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(child.pid) == "T")
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: state_of(child.pid) != "T")
        *reports, last = child.stdout.read().splitlines(keepends=True)
    assert child.returncode == 0
    assert last.endswith(b"\n")
    assert len(msgspec.json.decode(last, type=Share).records) == NUM_REQUESTS
    assert all(msgspec.json.decode(each, type=Progress) for each in reports)


def test_a_process_that_dies_is_an_error():
    others = children()

    def kill(_: Progress) -> None:
        for child in children() - others:
            os.kill(child, signal.SIGKILL)

    with pytest.raises(BenchError, match="ended before its load did"):
        asyncio.run(generate(load(10**6, requests_per_s=1.0), kill, is_apart=True))


def children() -> set[int]:
    return {int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
