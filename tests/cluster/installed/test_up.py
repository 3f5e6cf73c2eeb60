"""`prelude demo` and `prelude up` as a user meets them: progress, a line that says it is ready, snippets that work,
Ctrl-C that leaves nothing.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from adapters.files.locked_folder import SHARED_MEMORY
from cluster.local.shared_memory import mapped_below
from process.free_ports import free_port
from process.mapped_files import descendants

START_CPU_S = 60.0  # of all processes together: as long on one core, and half as long on two
STOPPED_WITHIN_S = 30.0
OWN_OUTPUT = (
    r"There is no authentication: the router serves this machine only\.\n"
    r"Starting 2 workers and the router\.\n"
    r"(?: +\d+\.\d s  (?:router|prefill-0|decode-0): .+\n)+"
    r"\nPrelude is ready: .+\n(?:.*\n){9}\nConsole: .+\nMetrics: .+   Logs: .+   Stop: Ctrl-C\n\nStopping\.\n"
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("up") / "demo"
    run = [sys.executable, "-m", "cli.main", "demo", str(folder), "--toy"]
    written = subprocess.run(run, check=True, capture_output=True, text=True)
    assert (written.stdout, written.stderr) == (f"{folder}/cluster.yaml\n", "")  # no library's warnings or progress
    config = folder / "cluster.yaml"
    config.write_text(config.read_text().replace("router:\n", f"router:\n  port: {free_port()}\n"))
    return config


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where temporary files go; a short path, because sockets are among them."""
    folder = Path(tempfile.mkdtemp(prefix="up-"))
    yield folder
    shutil.rmtree(folder)


def start(config: Path, scratch: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", "up", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )


def router_port(config: Path) -> int:
    return int(re.search(r"router:\n  port: (\d+)\n", config.read_text()).group(1))


def shared_memory_until_it_ends(process: subprocess.Popen) -> set[Path]:
    """What the processes below it map or hold open in shared memory until it ends.

    Other tests' killed engines leave files there meanwhile.
    """
    taken: set[Path] = set()
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        taken |= mapped_below(process.pid)
        for descriptor in (each for pid in descendants(process.pid) for each in Path(f"/proc/{pid}/fd").glob("*")):
            with contextlib.suppress(OSError):  # closed meanwhile
                if (file := descriptor.readlink()).is_relative_to(SHARED_MEMORY):
                    taken.add(file)
        time.sleep(0.05)
    return taken


def wait_for_the_end(processes: list[psutil.Process]) -> None:
    """One whose parent was killed may stay a zombie for a while, until the machine's first process takes it away."""
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def assert_nothing_is_left(processes: list[psutil.Process], files: set[Path], ports: set[int]) -> None:
    wait_for_the_end(processes)
    assert not {each for each in files if each.exists()}
    listening = {each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert not listening & ports


def test_up_serves_and_leaves_nothing(demo: Path, tmp_path: Path, scratch: Path):
    started_at = time.monotonic()
    process = start(demo, scratch)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  print("):
                break
        ready_s = time.monotonic() - started_at
        children = psutil.Process(process.pid).children(recursive=True)
        times = [each.cpu_times() for each in children]
        cpu_s = sum(each.user + each.system for each in times)
        text = "".join(lines)
        assert "prefill-0: the engine is starting" in text  # progress is shown
        [ready] = [line for line in lines if line.startswith("Prelude is ready")]
        print(f"ready after {ready_s:.1f} s, of which {cpu_s:.1f} s of a core")
        assert cpu_s < START_CPU_S
        assert re.search(r"http://127\.0\.0\.1:\d+", ready)

        curl = re.search(r"^  (curl .*?)\n\n", text, re.MULTILINE | re.DOTALL).group(1)
        answer = subprocess.run(["bash", "-c", curl.replace("curl ", "curl -sS ", 1)], capture_output=True, text=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"], answer.stderr

        snippet = re.search(r"^  from openai.*?print\([^\n]*\n", text, re.MULTILINE | re.DOTALL).group(0)
        script = tmp_path / "snippet.py"
        script.write_text("\n".join(line[2:] for line in snippet.splitlines()))
        answer = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        assert answer.stdout.strip(), answer.stderr

        assert len(children) > 6
        ports = {
            connection.laddr.port
            for child in children
            for connection in child.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(ports) > 5
        stopped_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        files = shared_memory_until_it_ends(process)
        assert process.returncode == 0
        print(f"stopped after {time.monotonic() - stopped_at:.1f} s")
        output = text + process.stdout.read()
        assert re.fullmatch(OWN_OUTPUT, output), output  # and nothing of the libraries'
        assert {"prelude-adapters", "sglang_loads"} <= {
            re.split("[-_](?=prefill|[0-9a-f]{8})", each.name)[0] for each in files
        }
        assert_nothing_is_left(children, {*files, *scratch.iterdir()}, ports)
    finally:
        process.kill()


@pytest.mark.parametrize("after_s", [0.3, 4.0])
def test_ctrl_c_while_it_starts(demo: Path, scratch: Path, after_s: float):
    process = start(demo, scratch)
    try:
        time.sleep(after_s)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        files = shared_memory_until_it_ends(process)
        assert_nothing_is_left(children, {*files, *scratch.iterdir()}, set())
    finally:
        process.kill()


def test_a_killed_supervisor_takes_everything_along(demo: Path, scratch: Path):
    """Nothing survives even a kill -9 of the supervisor; only its temporary folder stays, until the next start.

    That one ends at once, as its port is in use, and names it.
    """
    process = start(demo, scratch)
    while not has_engine(process):
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    wait_for_the_end(children)
    [folder] = scratch.glob("prelude-run-*")
    others = {*scratch.iterdir()} - {folder}
    with socket.socket() as other:
        # Connections of an earlier test's router may still be closing.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", router_port(demo)))
        other.listen()
        process = start(demo, scratch)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"router.port: 127.0.0.1:{router_port(demo)}" in output
    assert "Traceback" not in output
    assert {*scratch.iterdir()} == others


def has_engine(process: subprocess.Popen) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
        return any("engine.launch" in each.cmdline() for each in psutil.Process(process.pid).children(recursive=True))
    return False
