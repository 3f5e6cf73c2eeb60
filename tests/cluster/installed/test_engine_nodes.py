"""A decode engine over two nodes: a process for each, with an address of its own, as two pods would be.

Both are on this machine, so what the network between nodes adds is not shown. With PRELUDE_TEST_DEVICE=cuda and two
GPUs each node has one, and the prefill worker shares the first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from support.clusters.running_cluster import RunningCluster
from support.engines.parity import NEW_TOKENS, Case, check_tokens, completion_body
from support.engines.reference_answers import run_reference
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS

from cluster.config.load import load_cluster_config
from cluster.local.demo import make_model
from process.free_ports import free_port

pytestmark = pytest.mark.long

PREFILL, FIRST, OTHER = "127.0.0.21", "127.0.0.22", "127.0.0.23"
READY_S, END_S = 900.0, 120.0
ADAPTERS = (None, "a0", "reft")


class Cluster:
    """Processes that are started one by one."""

    def __init__(
        self, folder: Path, model: Path, adapters: dict[str, Path], stack: ExitStack, other_model: Path | None
    ) -> None:
        self.port, self.metrics = free_port(), free_port()
        self._folder, self._stack = folder, stack
        workers = {
            "prefill-0": {"role": "prefill", "host": PREFILL},
            "decode-0": {
                "role": "decode", "host": FIRST, "tensor_parallel": 2, "nodes": 2,
                "rendezvous_port": free_port(), "metrics_port": self.metrics,
            },
        }  # fmt: skip
        for worker in workers.values():
            for name in ("control_port", "metrics_port", "engine_port"):
                worker.setdefault(name, free_port())
        workers["prefill-0"]["bootstrap_port"] = free_port()
        data = {
            "model": {"path": str(model), "name": "demo", "dtype": "float32"},
            "engine": {
                "device": DEVICE, "max_total_tokens": 8192, "chunked_prefill_tokens": 64, "context_length": 2048,
                "start_timeout_s": READY_S, "hang_timeout_s": 60,
                "extra_arguments": EXTRA_ARGUMENTS,
            },
            "router": {"port": self.port, "admin": {"port": free_port()}, "insecure": True},
            "workers": workers,
            "adapters": {name: {"path": str(path)} for name, path in adapters.items() if name in ADAPTERS},
        }  # fmt: skip
        self.path = folder / "cluster.yaml"
        self.path.write_text(yaml.safe_dump(data))
        self.of_other = folder / "other.yaml"  # the file of the other node, as it might be on its own disk
        self.of_other.write_text(
            yaml.safe_dump({**data, "model": {**data["model"], "path": str(other_model or model)}})
        )
        self.running = RunningCluster(
            url=f"http://127.0.0.1:{self.port}", model_dir=model, adapters=adapters, logs=folder,
            config=load_cluster_config(self.path), supervisor=psutil.Process(),
        )  # fmt: skip

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        # A short one: the engine's sockets are in it.
        scratch = [] if words[0] == "router" else ["--scratch", tempfile.mkdtemp()]
        gpu = {"CUDA_VISIBLE_DEVICES": "1" if log == "other" else "0"} if DEVICE == "cuda" else {}
        config = self.of_other if log == "other" else self.path
        output = self._stack.enter_context((self._folder / f"{log}.log").open("wb"))
        command = [sys.executable, "-m", "cli.main", *words, "--config", str(config), *scratch]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **gpu, "PRELUDE_DIE_WITH_PARENT": "1"}
        )
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _cluster(
    folder: Path, model: Path, adapters: dict[str, Path], other_model: Path | None = None
) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(folder, model, adapters, stack, other_model)


@pytest.mark.timeout(2400)
def test_two_nodes_decode_and_end_together(
    tmp_path: Path, model_dir: Path, adapters: dict[str, Path], tmp_path_factory
):
    ids = tuple(20 + 7 * number % 280 for number in range(133))  # over several chunks
    asked = [
        {"adapter": adapters[name] if name else None, "prompt_ids": ids, "max_new_tokens": NEW_TOKENS,
         "positions": "prefill"}
        for name in ADAPTERS
    ]  # fmt: skip
    answers = run_reference(model_dir, asked, tmp_path_factory.mktemp("reference"))
    cases = [Case(name, "chunks", ids, answer) for name, answer in zip(ADAPTERS, answers, strict=True)]
    assert len({tuple(case.reference["tokens"]) for case in cases}) == len(cases)  # the adapters change answers
    with _cluster(tmp_path, model_dir, adapters) as cluster:
        decode = ("decode-worker", "--name", "decode-0")
        other = cluster.start("other", *decode, "--node-rank", "1", "--first-node", FIRST, "--host", OTHER)
        first = cluster.start("first", *decode)
        cluster.start("prefill", "prefill-worker", "--name", "prefill-0")
        cluster.start("router", "router")
        cluster.running.wait_ready(READY_S)
        assert httpx.get(f"http://{OTHER}:{cluster.metrics}/ready", timeout=30).status_code == 200
        for case in cases:
            answer = httpx.post(
                f"{cluster.running.url}/v1/completions",
                json=completion_body(case.adapter, case.prompt_ids),
                timeout=300,
            )
            assert answer.status_code == 200, answer.text
            check_tokens(case, answer.json())
        # Asked to stop, the other node waits for the first, whose requests need it.
        other.send_signal(signal.SIGTERM)
        until = time.monotonic() + END_S
        while httpx.get(f"http://{OTHER}:{cluster.metrics}/ready", timeout=30).status_code != 503:
            assert time.monotonic() < until
            time.sleep(0.1)
        answer = httpx.post(f"{cluster.running.url}/v1/completions", json=completion_body(None, ids), timeout=300)
        check_tokens(cases[0], answer.json())
        # The end of one process is that of both: a node cannot come back to ranks that run.
        psutil.Process(first.pid).children()[0].kill()
        assert first.wait(END_S) == 1
        assert other.wait(END_S) == 0


@pytest.mark.timeout(2400)
def test_nodes_with_other_weights_do_not_start(tmp_path: Path, model_dir: Path):
    other_model = tmp_path / "other"
    make_model(other_model, seed=1)
    with _cluster(tmp_path, model_dir, {}, other_model) as cluster:
        decode = ("decode-worker", "--name", "decode-0")
        other = cluster.start("other", *decode, "--node-rank", "1", "--first-node", FIRST, "--host", OTHER)
        first = cluster.start("first", *decode)
        assert first.wait(READY_S) == 1
        assert other.wait(END_S) == 1
    for log in ("first", "other"):
        assert "give all nodes of the engine the same files" in (tmp_path / f"{log}.log").read_text()
