"""The router as a process: starts without workers, reports it, stops on a signal, and imports no engine."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from support.adapters.damaged_adapters import write_large_header
from support.clusters.configs import config_of
from support.router_stand_ins import repository_root

from adapters.formats.safetensors_file import MAX_HEADER_BYTES
from adapters.model.base_model import BaseModel
from process.free_ports import free_port
from router.server import _context_length

WITHIN_S = 60.0  # on a machine that stalls
MODEL = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16}
MODEL |= {"num_attention_heads": 2, "vocab_size": 100}
ROLES = {"p0": "prefill", "d0": "decode"}


def get(url: str) -> tuple[int, dict]:
    answer = httpx.get(url, timeout=120)
    return answer.status_code, answer.json()


def cluster_file(folder: Path, port: int, **sections: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(MODEL))
    cluster = {
        "model": {"path": str(folder), "name": "base"},
        "router": {"port": port, "admin": {"port": free_port()}},
        "workers": {name: {"role": role, "control_port": free_port()} for name, role in ROLES.items()},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster | sections))
    return folder / "cluster.yaml"


@contextmanager
def running(
    folder: Path, *command: str, admin_port: int = 0, **sections: Any
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router that answers, and its URL. `command`: of its Python, in place of the command line."""
    port = free_port()
    router = {"port": port, "admin": {"port": admin_port}, **sections.pop("router", {})}
    config = cluster_file(folder, port, router=router, **sections)
    words = [sys.executable, *(command or ("-m", "cli.main", "router")), "--config", str(config)]
    process = subprocess.Popen(words, cwd=repository_root(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + WITHIN_S
    try:
        while True:
            try:
                get(f"{url}/ready")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_start_and_stop(tmp_path: Path) -> None:
    admin_port = free_port()
    with running(tmp_path, admin_port=admin_port) as (process, url):
        status, ready = get(f"{url}/ready")
        assert status == 503
        assert ready.keys() == {"ready", "reason"}  # the workers are for the admin listener
        assert set(get(f"http://127.0.0.1:{admin_port}/ready")[1]["workers"]) == {"p0", "d0"}
        assert get(f"{url}/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 0
        assert all(json.loads(line)["process"] == "router" for line in log.splitlines())


_WAITING = """
import asyncio, sys
import cli.main
from router.generation.sequence_run import PlacementSearch

PlacementSearch.first = lambda *_, **__: print("asked", flush=True) or asyncio.sleep(120)
cli.main.main(["router", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "-c", _WAITING, router={"drain_timeout_s": 20}) as (process, url):
        body = {"model": "base", "prompt": "Hi"}
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=WITHIN_S)
            assert process.stdout
            assert process.stdout.readline() == b"asked\n"
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WITHIN_S) == -signal.SIGTERM
            assert isinstance(asking.exception(), httpx.TransportError)


@pytest.mark.slow
def test_a_hostile_upload_holds_nothing_up(tmp_path: Path) -> None:
    """`/health` is answered while a header of 15 MB is parsed, in a process whose memory is not the router's."""
    with running(tmp_path, router={"management": True}) as (process, url):
        upload = write_large_header(tmp_path / "adapter", BaseModel.read(tmp_path))
        files = [("file", (path.name, path.read_bytes())) for path in upload.iterdir()]
        before, answered_meanwhile = peak_bytes(process.pid), 0
        asked = {"data": {"name": "bot"}, "files": files, "timeout": WITHIN_S}
        with ThreadPoolExecutor(1) as pool:
            uploading = pool.submit(httpx.post, f"{url}/v1/adapters", **asked)
            while not uploading.done():
                children = psutil.Process(process.pid).children()
                assert get(f"{url}/health")[0] == 200
                answered_meanwhile += any(child.is_running() for child in children)
        answer = uploading.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_malformed")
        assert answered_meanwhile > 2
        # The upload is buffered; parsed it takes 25 times as much.
        assert peak_bytes(process.pid) - before < 8 * MAX_HEADER_BYTES


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


_HANGING = """
import sys, time
from adapters.catalog.sql.cached import CachedResolver
import cli.main, router.revisions.adapter_service, router.revisions.configured_adapters

def hang(*_, **__):
    print("hangs", flush=True)
    time.sleep(120)

{hook} = hang
router.revisions.adapter_service._START_S = 0.2
cli.main.main(["router", *sys.argv[1:]])
"""


@pytest.mark.parametrize("hook", ["router.revisions.configured_adapters.pack_directory", "CachedResolver.close"])
@pytest.mark.slow
def test_threads_that_hang_do_not_keep_it(tmp_path: Path, hook: str) -> None:
    """A mount that does not answer an import, and a database that does not answer while its connections are closed."""
    sections = {"router": {"drain_timeout_s": 1}, "adapters": {"a0": {"path": str(tmp_path / "a0")}}}
    with running(tmp_path, "-c", _HANGING.format(hook=hook), **sections) as (process, _url):
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=WITHIN_S)
        assert (output, process.returncode) == (b"hangs\n", 0)
        assert json.loads(log.splitlines()[-1])["message"] == "router stopped"


@pytest.mark.slow
def test_an_admin_port_that_is_taken_is_named(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        config = cluster_file(tmp_path, port, router={"port": port, "admin": {"port": taken}})
        command = [sys.executable, "-m", "cli.main", "router", "--config", str(config)]
        done = subprocess.run(command, cwd=repository_root(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"router.admin.port: 127.0.0.1:{taken} is not available" in done.stderr


@pytest.mark.parametrize(("given", "expected"), [(None, 8192), (2048, 2048)])
def test_discovered_engines_have_the_clusters_context_length(given: int | None, expected: int, tmp_path: Path):
    discovery = {"unified": {"dns": "unified.example.org", "control_port": 9000}}
    config = config_of({}, tmp_path, engine={"context_length": given}, discovery=discovery)
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 8192}))
    assert _context_length(config, BaseModel.read(tmp_path)) == expected
