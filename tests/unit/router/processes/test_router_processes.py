"""Several processes of one router: real ones, on one port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.router_stand_ins import repository_root

from bench.systems.routers import our_config, running_workers, workers
from cluster.config.load import load_cluster_config

pytestmark = pytest.mark.slow


@contextmanager
def running_router(folder: Path, **router: Any) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A router of two processes over mock workers, its URL and that of its admin listener."""
    settings = workers(num_events=100, event_gap_s=0.05)
    port, path = our_config(settings, folder, {"processes": 2, **router})
    with running_workers(settings, folder), (folder / "router.log").open("wb") as log:
        command = [sys.executable, "-m", "cli.main", "router", "--config", str(path)]
        process = subprocess.Popen(command, cwd=repository_root(), stderr=log, env={**os.environ})
        try:
            admin_port = load_cluster_config(path).router.admin_port
            yield process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        finally:
            process.kill()
            process.wait()


def get(url: str) -> tuple[int, bytes]:
    """Over a connection of its own, so that any process may get it."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def eventually(url: str, is_right: Any) -> bytes:
    deadline = time.monotonic() + 90
    while True:
        status, body = get(url)
        if is_right(status, body):
            return body
        assert time.monotonic() < deadline, (status, body[-2000:])
        time.sleep(0.1)


def is_ready(status: int, _: bytes) -> bool:
    return status == 200


def ask(url: str, *, stream: bool) -> Any:
    body = {"model": "mock", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=20)


def _processes_of(console_state: bytes) -> set[str]:
    return set(json.loads(console_state or b"{}").get("processes", ()))


def test_they_share_a_port_and_answer_for_each_other(tmp_path: Path) -> None:
    with running_router(tmp_path, drain_timeout_s=20) as (process, url, admin_url):
        eventually(f"{url}/ready", is_ready)
        num_processes = b"prelude_router_processes 2.0\n"
        eventually(f"{admin_url}/metrics", lambda _, page: num_processes in page)
        eventually(f"{admin_url}/console/state", lambda _, page: _processes_of(page) == {"0", "1"})
        for _ in range(8):
            with ask(url, stream=False) as answer:
                assert answer.status == 200
        for _ in range(4):  # whoever answers, all requests are there
            status, page = get(f"{admin_url}/metrics")
            assert (status, num_processes in page) == (200, True)
            assert b'prelude_router_requests_total{endpoint="chat",status="200"} 8.0\n' in page

        streams = [ask(url, stream=True) for _ in range(12)]
        found = json.loads(get(f"{admin_url}/debug/requests")[1])["requests"]
        assert len(found) == 12
        assert {each["process"] for each in found} == {0, 1}

        process.send_signal(signal.SIGTERM)  # they finish what they have begun
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)
        assert process.wait(15) == 0
    log = [json.loads(line) for line in (tmp_path / "router.log").read_text().splitlines()]
    assert {line["process"] for line in log} == {"router", "router-0", "router-1"}


def test_one_that_dies_is_started_again_and_all_die_with_their_supervisor(tmp_path: Path) -> None:
    with running_router(tmp_path) as (process, url, admin_url):
        eventually(f"{url}/ready", is_ready)
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        children[0].kill()
        children[0].wait(5)
        with ask(url, stream=False) as answer:  # the other one has the port for itself
            assert answer.status == 200
        eventually(f"{admin_url}/metrics", lambda _, page: b"prelude_router_processes 2.0\n" in page)
        children = psutil.Process(process.pid).children()
        process.kill()
        assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, path = our_config(workers(1, 0.0), tmp_path, {"processes": 2, "port": port})
        command = [sys.executable, "-m", "cli.main", "router", "--config", str(path)]
        done = subprocess.run(command, cwd=repository_root(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert f"router.port: 127.0.0.1:{port} is not available" in done.stderr


def test_a_configuration_that_no_process_can_use_ends_all(tmp_path: Path) -> None:
    _, path = our_config(workers(1, 0.0), tmp_path, {"processes": 2})
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "cli.main", "router", "--config", str(path)]
    done = subprocess.run(command, cwd=repository_root(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "prelude: " in done.stderr
