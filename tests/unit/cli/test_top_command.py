"""`prelude top` of a real router before stand-ins of workers."""

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.in_thread import in_thread
from support.router_stand_ins import ClusterStandIn, answers, eventually, running_cluster
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
    "model": "\x1b[2J" * 30, "router": "a", "at_s": 1.0, "workers": [WORKER], "num_workers": 1, "num_placeable": 1,
    "requests": [], "num_requests": 0, "tokens": 0,
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
        workers, requests = found.state["workers"], found.state["requests"]
        in_memory = sum(each["num_in_host_memory"] for each in workers)
        return (in_memory, [s["phase"] for r in requests for s in r["sequences"]]) == (num_in_host_memory, phases)

    return await eventually(lambda: asyncio.to_thread(_sample, cluster.admin_url), is_it)


@pytest.mark.slow
async def test_a_frame_has_rates_latencies_and_loads() -> None:
    async with running_cluster(2, 1) as cluster:
        home, other = cluster.prefill_by_affinity
        first = await sample_with(cluster, 0, [])
        for _ in range(3):
            await cluster.stream(prompt="Hi")
        cluster.decode[0].engine.behaviours = [answers(500)] * 3
        assert (await cluster.post(prompt="Hi"))[0] == 502
        await cluster.is_idle()
        await home.make_resident("sha256:" + "1" * 64)
        second = await sample_with(cluster, 1, [])
        home.ensure_delay_s = other.ensure_delay_s = 60.0
        loading = [asyncio.create_task(cluster.post(prompt="Hi", adapter="a0")) for _ in range(2)]
        third = await sample_with(cluster, 1, ["ensuring_adapter"] * 2)
        for task in loading:
            task.cancel()
        num_tokens = 3 * len(cluster.decode[0].engine.words)
    second = replace(second, at_s=first.at_s + 2.0, state=second.state | {"at_s": first.state["at_s"] + 2.0})
    title, rates, latencies, head, *rows = _frame([first, second])
    assert title == "3 of 3 workers take requests, 0 in flight   base"
    assert rates == f"requests/s 1.5   failed/s 0.5   tokens/s {num_tokens / 2:.1f}"
    assert re.fullmatch(r"TTFT p50 \S+ ms p95 \S+ ms   TPOT p50 \S+ ms p95 \S+ ms", latencies)
    assert {len(line) for line in (head, *rows)} == {80}
    assert [row.split()[:3] for row in rows] == [
        ["p0", "prefill", "placeable"], ["p1", "prefill", "placeable"], ["d0", "decode", "placeable"],
    ]  # fmt: skip
    cells = {row.split()[0]: row.split() for row in rows}
    assert (cells[home.name][-3:], cells[other.name][-3:]) == (["1", "0", "0"], ["0", "0", "0"])
    cells = {row.split()[0]: row.split() for row in list(_frame([third]))[4:]}
    assert (cells[home.name][3], cells[home.name][-1], cells[other.name][-1]) == ("2", "1", "0")  # both for one load
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
    state: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        text = f'x_bucket{{le="1"}} {state.get("bucket", 1)}\n'
        return web.json_response(state) if request.path == "/console/state" else web.Response(text=text)

    with in_thread(served([web.get("/console/state", answer), web.get("/metrics", answer)])) as url:
        role = {"workers": [{**WORKER, "role": "\x1b]0;"}]}
        for wrong in (role, {"tokens": "\x1b[2J"}, {"requests": 1}, {"bucket": "+Inf"}, {"at_s": None}):
            state.clear()
            state |= {**STATE, **wrong}
            code, output, errors = await top("--url", url)
            assert (code, output, errors.count("\n")) == (1, "", 1), errors
            assert f"prelude: {url} tells nothing of a router: " in errors
            assert errors.strip().isprintable()
        state |= {**STATE, "bucket": 1}
        code, output, errors = await top("--url", url)
    assert (code, errors) == (0, "")
    assert max(map(len, output.splitlines())) <= 80
    assert output.replace("\n", "").isprintable()
    assert output.splitlines()[-1].startswith("a" * 15 + "-? prefill placeable ")
    code, output, errors = await top("--url", f"http://127.0.0.1:{free_port()}")
    assert (code, output) == (1, "")
    assert "Connection refused>; --url takes a router's admin listener" in errors
    silent = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)  # speaks no HTTP
    async with silent:
        code, output, errors = await top("--url", f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    assert (code, output, "Traceback" in errors) == (1, "", False)
