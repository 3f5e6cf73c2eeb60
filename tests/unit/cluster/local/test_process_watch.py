"""`prelude up` ends a router or an agent that hangs: real processes, really stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable

import aiohttp
import pytest

from cluster.local import process_watch
from cluster.local.process_watch import ProcessWatch
from engine import hang_watch
from engine.hang_watch import Timeouts
from process.free_ports import free_port

pytestmark = pytest.mark.slow

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
WITHIN_S = 40.0


async def end(watching: asyncio.Task[None], processes: Iterable[asyncio.subprocess.Process]) -> None:
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_only_the_one_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(process_watch, "_TIMEOUTS", Timeouts(hang_s=1.0, batch_s=0.0))
    monkeypatch.setattr(process_watch, "_ASK_EVERY_S", 0.05)
    monkeypatch.setattr(process_watch, "OBSERVE_S", 0.1)
    monkeypatch.setattr(hang_watch, "_MAX_COUNTED_S", 0.15)

    processes, urls = {}, {}
    for name in ("router", "p0"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        processes[name] = process
        urls[name] = f"http://127.0.0.1:{int(await process.stdout.readline())}/health"
    urls["starting"] = "http://127.0.0.1:1/health"
    reports: list[str] = []

    def pid_of(name: str) -> int | None:
        if name == "starting":  # for long, and no hang
            return os.getpid()
        return None if processes[name].returncode is not None else processes[name].pid

    timeout = aiohttp.ClientTimeout(total=0.5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        watch = ProcessWatch(session, urls, pid_of, reports.append)
        watching = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(WITHIN_S):
                while len(watch._watched) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                os.kill(processes["p0"].pid, signal.SIGSTOP)
                assert await processes["p0"].wait() == -signal.SIGKILL
            assert reports == ["p0 hangs; ending it"]
            await asyncio.sleep(0.3)
            assert processes["router"].returncode is None
            assert not watching.done()
        finally:
            await end(watching, processes.values())


@pytest.mark.parametrize(
    ("seconds", "hangs", "is_signalled"),
    [
        ({"_START_IDLE_S": 3.0, "_START_STOPPED_S": 600.0}, "import time; time.sleep(600)", False),
        ({"_START_IDLE_S": 600.0, "_START_STOPPED_S": 3.0}, SERVER, True),
    ],
    ids=("idle", "stopped"),
)
async def test_one_that_hangs_before_its_first_answer_is_ended(
    monkeypatch, seconds: dict[str, float], hangs: str, is_signalled: bool
):
    for name, value in seconds.items():
        monkeypatch.setattr(process_watch, name, value)
    monkeypatch.setattr(process_watch, "OBSERVE_S", 0.1)

    programs = {"router": hangs, "starting": "while True: pass"}  # the second for long, and no hang
    processes = {
        name: await asyncio.create_subprocess_exec(sys.executable, "-c", program, start_new_session=True)
        for name, program in programs.items()
    }
    if is_signalled:
        os.kill(processes["router"].pid, signal.SIGSTOP)
    reports: list[str] = []

    def pid_of(name: str) -> int | None:
        return None if processes[name].returncode is not None else processes[name].pid

    async with aiohttp.ClientSession() as session:
        urls = dict.fromkeys(processes, "http://127.0.0.1:1/health")
        watching = asyncio.create_task(ProcessWatch(session, urls, pid_of, reports.append).run())
        try:
            async with asyncio.timeout(WITHIN_S):
                assert await processes["router"].wait() == -signal.SIGKILL
            await asyncio.sleep(0.3)
            assert reports == ["router hangs; ending it"]
        finally:
            await end(watching, processes.values())


async def test_a_new_process_is_watched_as_soon_as_it_answers(monkeypatch):
    """A router serves clients at once, so it may hang with their requests before it was asked the second time."""
    monkeypatch.setattr(process_watch, "_ASK_EVERY_S", 600.0)
    monkeypatch.setattr(process_watch, "_ASK_EARLY_EVERY_S", 0.05)

    port, process = free_port(), None
    urls = {"router": f"http://127.0.0.1:{port}/health"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as session:
        watch = ProcessWatch(session, urls, lambda _name: os.getpid(), print)
        watching = asyncio.create_task(watch.run())
        try:
            await asyncio.sleep(0.2)
            assert not watch._watched  # nobody answers
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SERVER, str(port), start_new_session=True
            )
            async with asyncio.timeout(WITHIN_S):
                while not watch._watched:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            assert watch._watched["router"].num_answers == 1  # then rarely
        finally:
            await end(watching, [process] if process else [])
