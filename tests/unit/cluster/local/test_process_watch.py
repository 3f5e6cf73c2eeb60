"""`prelude up` ends a router or an agent that hangs: real processes, really stopped."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
import pytest
from support.waiting import until

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


async def started(program: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )


def pid(process: asyncio.subprocess.Process) -> int | None:
    return None if process.returncode is not None else process.pid


@asynccontextmanager
async def watched(
    urls: Mapping[str, str], pid_of: Callable[[str], int | None], processes: list[asyncio.subprocess.Process]
) -> AsyncIterator[tuple[ProcessWatch, list[str]]]:
    """A watch that runs inside the block, and what it reports. The processes end with it."""
    reports: list[str] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as session:
        watch = ProcessWatch(session, urls, pid_of, reports.append)
        watching = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(WITHIN_S):
                yield watch, reports
            assert not watching.done()
        finally:
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

    processes = {name: await started(SERVER) for name in ("router", "p0")}
    urls = {}
    for name, process in processes.items():
        assert process.stdout is not None
        urls[name] = f"http://127.0.0.1:{int(await process.stdout.readline())}/health"
    urls["starting"] = "http://127.0.0.1:1/health"

    def pid_of(name: str) -> int | None:
        return os.getpid() if name == "starting" else pid(processes[name])  # which starts for long, and is no hang

    async with watched(urls, pid_of, [*processes.values()]) as (watch, reports):
        await until(lambda: len(answering(watch)) == 2, WITHIN_S)
        os.kill(processes["p0"].pid, signal.SIGSTOP)
        assert await processes["p0"].wait() == -signal.SIGKILL
        assert reports == ["p0 hangs; ending it"]
        await asyncio.sleep(0.3)
        assert processes["router"].returncode is None


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_one_that_hangs_before_its_first_answer_is_ended(monkeypatch, is_stopped: bool):
    monkeypatch.setattr(process_watch, "_START_TIMEOUTS", Timeouts(hang_s=1.5, batch_s=0.0))
    monkeypatch.setattr(process_watch, "OBSERVE_S", 0.1)
    monkeypatch.setattr(hang_watch, "_MAX_COUNTED_S", 0.15)

    # The second starts for long, and is no hang.
    programs = {"router": SERVER if is_stopped else "import time; time.sleep(600)", "starting": "while True: pass"}
    processes = {name: await started(program) for name, program in programs.items()}
    if is_stopped:
        os.kill(processes["router"].pid, signal.SIGSTOP)
    urls = dict.fromkeys(processes, "http://127.0.0.1:1/health")
    async with watched(urls, lambda name: pid(processes[name]), [*processes.values()]) as (_, reports):
        assert await processes["router"].wait() == -signal.SIGKILL
        await asyncio.sleep(0.3)
        assert reports == ["router hangs; ending it"]


def answering(watch: ProcessWatch) -> list[str]:
    return [name for name, each in watch._watched.items() if each.num_answers]


async def test_a_new_process_is_watched_as_soon_as_it_answers(monkeypatch):
    """A router serves clients at once, so it may hang with their requests before it was asked the second time."""
    monkeypatch.setattr(process_watch, "_ASK_EVERY_S", 600.0)
    monkeypatch.setattr(process_watch, "_ASK_EARLY_EVERY_S", 0.05)
    port, processes = free_port(), []
    urls = {"router": f"http://127.0.0.1:{port}/health"}
    async with watched(urls, lambda _name: os.getpid(), processes) as (watch, _):
        await asyncio.sleep(0.2)
        assert not answering(watch)
        processes.append(await started(SERVER, str(port)))
        await until(lambda: answering(watch), WITHIN_S)
        await asyncio.sleep(0.5)
        assert watch._watched["router"].num_answers == 1  # then rarely
