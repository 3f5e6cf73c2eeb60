"""`prelude top` of a real router before stand-ins of workers."""

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.in_thread import in_thread
from support.router_stand_ins import WORDS, ClusterStandIn, answers, eventually, running_cluster
from support.routers.served_routes import served

from cli.fleet.top import _frame, _Sample, _sample
from process.free_ports import free_port

COMMAND = (sys.executable, "-m", "cli.main", "top", "--interval", "0.1")
REDRAW = b"\x1b[H\x1b[J"
WORKER = {
    "name": "a" * 50 + "-\x07", "role": "prefill", "condition": "placeable", "sequences": 1, "queued_prompt_tokens": 2,
    "queue_s": None, "kv_used": 0.5, "num_in_host_memory": 3, "num_on_disk": 4,
}  # fmt: skip
STATE: dict[str, Any] = {
    "model": "\x1b[2J" * 30, "router": "a", "workers": [WORKER], "num_workers": 1, "num_placeable": 1,
    "requests": [], "num_requests": 0,
}  # fmt: skip


async def top(*options: str) -> tuple[int, str, str]:
    """Its exit status, output and errors, over pipes."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, **pipes)
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def sample_with(cluster: ClusterStandIn, num_in_host_memory: int, phases: list[str]) -> _Sample:
    """A sample, once the router's state is that; it keeps one for half a second."""

    def is_it(found: _Sample) -> bool:
        in_memory = sum(each["num_in_host_memory"] for each in found.state["workers"])
        of = [sequence["phase"] for request in found.state["requests"] for sequence in request["sequences"]]
        return (in_memory, of) == (num_in_host_memory, phases)

    return await eventually(lambda: asyncio.to_thread(_sample, cluster.admin_url), is_it)


@pytest.mark.slow
async def test_a_frame_has_rates_latencies_and_loads() -> None:
    async with running_cluster(1, 1) as cluster:
        first = await sample_with(cluster, 0, [])
        for _ in range(3):
            await cluster.stream(prompt="Hi")
        cluster.decode[0].engine.behaviours = [answers(500)] * 3
        assert [(await cluster.post(prompt="Hi", **each))[0] for each in ({}, {"adapter": "nobody"})] == [502, 404]
        await cluster.is_idle()
        await cluster.prefill[0].make_resident("sha256:" + "1" * 64)
        second = await sample_with(cluster, 1, [])
        cluster.prefill[0].ensure_delay_s = 60.0
        loading = [asyncio.create_task(cluster.post(prompt="Hi", adapter="a0")) for _ in range(2)]
        third = await sample_with(cluster, 1, ["ensuring_adapter"] * 2)
        for task in loading:
            task.cancel()
    second = replace(second, at_s=first.at_s + 2.0, state=second.state | {"at_s": first.state["at_s"] + 2.0})
    title, rates, latencies, head, *rows = _frame([first, second])
    assert title == "2 of 2 workers take requests, 0 in flight   base"
    assert rates == f"requests/s 2.0   failed/s 0.5   tokens/s {3 * len(WORDS) / 2:.1f}"
    assert re.fullmatch(r"TTFT p50 \S+ ms p95 \S+ ms   TPOT p50 \S+ ms p95 \S+ ms", latencies)
    assert {len(line) for line in (head, *rows)} == {80}
    assert [row.split()[:3] for row in rows] == [["p0", "prefill", "placeable"], ["d0", "decode", "placeable"]]
    assert [row.split()[-3:] for row in rows] == [["1", "0", "0"], ["-", "-", "-"]]
    sequences, loads = (list(_frame([third]))[4].split()[column] for column in (3, -1))
    assert (sequences, loads) == ("2", "1")  # both wait for one load
    restarted = replace(second, state=second.state | {"router": "another one"})
    assert list(_frame([first, restarted]))[1].startswith("requests/s 0.0 ")


@pytest.mark.slow
async def test_a_pipe_gets_one_frame_and_a_terminal_more(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    terminal, end = pty.openpty()
    async with running_cluster(1, 1) as cluster:
        admin = f"{{admin: {{port: {cluster.admin_url.rpartition(':')[2]}}}}}"
        path.write_text(f"model: {{path: ., name: demo}}\nrouter: {admin}\nworkers: {{a: {{role: unified}}}}\n")
        code, output, errors = await top("--config", str(path))
        assert (code, errors, len(output.splitlines())) == (0, "", 6)
        assert output.replace("\n", "").isprintable()
        process = await asyncio.create_subprocess_exec(*COMMAND, "--url", cluster.admin_url, stdin=end, stdout=end)
        os.close(end)
        seen = b""
        while seen.count(REDRAW) < 3:
            seen += await asyncio.to_thread(os.read, terminal, 1000)
    while b"does not answer" not in seen:  # the router has ended
        seen += await asyncio.to_thread(os.read, terminal, 1000)
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0
    os.close(terminal)


@pytest.mark.slow
async def test_an_answer_may_be_anything() -> None:
    numbers, told, said = count(), dict[str, Any](), [b"\0\0\6\n", b"HTTP/1.1 500 \x1b[2J\r\n\r\n"]

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text=f'x_bucket{{le="1"}} {told.get("bucket", 1)}\n')
        number = next(numbers)
        return web.json_response({**STATE, "at_s": 0.5 * number, "tokens": 100 * number, **told})

    def say(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(said.pop())
        writer.close()

    async def refused(url: str) -> str:
        code, output, errors = await top("--url", url)
        assert (code, output, errors.count("\n")) == (1, "", 1), errors
        assert errors.strip().isprintable()
        return errors

    with in_thread(served([web.get("/console/state", answer), web.get("/metrics", answer)])) as url:
        code, output, errors = await top("--url", url)
        wrong = [{"workers": [{**WORKER, "role": "\x1b]0;"}]}, {"tokens": [1]}, {"requests": 1}, {"bucket": "+Inf"}]
        while wrong:
            told = wrong.pop()
            assert f"prelude: {url} tells nothing of a router: " in await refused(url)
    assert (code, errors) == (0, "")
    assert max(map(len, output.splitlines())) <= 80
    assert output.replace("\n", "").isprintable()
    assert "tokens/s 200.0" in output
    assert output.splitlines()[-1].startswith("a" * 15 + "-? prefill placeable ")
    assert "Connection refused>; --url takes a" in await refused(f"http://127.0.0.1:{free_port()}")
    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        while said:
            await refused(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
