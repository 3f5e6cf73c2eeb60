"""One real cluster for the whole session: router, prefill and decode workers, real SGLang engines, KV over NIXL.

It is started as users start it, by `prelude up`, in processes of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from adapters.base_model import BaseModel
from adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from cluster.demo import make_model
from cluster.ports import with_ports

CHUNK_TOKENS = 64  # of prefill; prompts in the tests are shorter, equal and longer
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class RunningCluster:
    """What tests know of the cluster."""

    url: str
    model_dir: Path
    adapters: dict[str, Path]
    logs: Path
    config: Any
    supervisor: psutil.Process

    def process(self, name: str) -> psutil.Process:
        """The agent of a worker, or the router."""
        for child in self.supervisor.children():
            words = child.cmdline()
            if (name == "router" and "router" in words) or ("--name" in words and name in words):
                return child
        raise LookupError(f"there is no process {name}")

    def engine(self, name: str) -> psutil.Process:
        """The SGLang server of a worker."""
        return next(child for child in self.process(name).children() if "engine.launch" in child.cmdline())

    def engine_url(self, name: str) -> str:
        """Base URL of a worker's SGLang server: for looking inside, never the way of a request."""
        worker = self.config.workers[name]
        return f"http://{worker.host}:{worker.engine_port}"

    def worker_url(self, name: str) -> str:
        """Base URL of an agent's metrics and readiness."""
        worker = self.config.workers[name]
        return f"http://{worker.host}:{worker.metrics_port}"

    def wait_ready(self, timeout_s: float) -> float:
        """Wait until the router and both workers are ready; the seconds that took."""
        started_at = time.monotonic()
        urls = [f"{self.url}/ready", *(f"{self.worker_url(name)}/ready" for name in self.config.workers)]
        while time.monotonic() - started_at < timeout_s:
            if all(_is_ready(url) for url in urls):
                return time.monotonic() - started_at
            time.sleep(0.1)
        raise TimeoutError(f"not ready within {timeout_s} s")

    def loads(self) -> dict[str, tuple[int, int, int]]:
        """(running, queued, KV tokens of running requests) per worker, as its engine says."""
        loads = {}
        for name in self.config.workers:
            rank = httpx.get(f"{self.engine_url(name)}/v1/loads").json()["loads"][0]
            loads[name] = (rank["num_running_reqs"], rank["num_waiting_reqs"], rank["num_used_tokens"])
        return loads


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A small Llama with random weights, float32."""
    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(tmp_path_factory, model_dir: Path) -> dict[str, Path]:
    """Adapters as users have them, and a zero one."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("adapters")
    return {
        "a0": write_random_lora(root / "a0", base, seed=10),
        "a1": write_random_lora(root / "a1", base, seed=11, modules=("q_proj",), rank=4, use_rslora=True),
        "a2": write_random_lora(
            root / "a2", base, seed=12, modules=("v_proj", "up_proj"), rank=16, rank_pattern={"up_proj": 3}, alpha=8
        ),
        "a3": write_random_lora(root / "a3", base, seed=13, dtype="bfloat16", layers=(1, 3), std=0.6),
        "reft": write_random_reft(root / "reft", base, 15, rank=8),
        "loreft": write_random_reft(root / "loreft", base, 16, kind="loreft", layout="pyreft", layers=(0, 2)),
        "mixed": write_random_mixed(root / "mixed", base, 17),
        "zero": write_random_lora(root / "zero", base, seed=14, zero=True),
    }


@pytest.fixture(scope="session")
def bad_adapters(tmp_path_factory, adapters: dict[str, Path]) -> dict[str, Path]:
    """Directories that cannot be served, by what is wrong with them."""
    root = tmp_path_factory.mktemp("bad")
    make_model(root / "other-model", hidden=64, num_layers=2)
    other = write_random_lora(root / "other-base", BaseModel.read(root / "other-model"), seed=1)
    config = (adapters["a0"] / "adapter_config.json").read_text()
    malformed, pickled = root / "malformed", root / "pickled"
    for folder in (malformed, pickled):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
    (malformed / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    everywhere = root / "everywhere"  # fine, but not on a cluster of pairs
    shutil.copytree(adapters["a0"], everywhere)
    (everywhere / "adapter_config.json").write_text(json.dumps({**json.loads(config), "prelude": {"positions": "all"}}))
    return {
        "missing": root / "nowhere",
        "malformed": malformed,
        "pickled": pickled,
        "other-base": other,
        "everywhere": everywhere,
    }


@contextlib.contextmanager
def running_cluster(
    root: Path, model_dir: Path, adapters: dict[str, Path], named: dict[str, Any] | None = None, **sections: Any
) -> Iterator[RunningCluster]:
    """A cluster, ready, for as long as the context lasts: of one pair, unless `sections` of cluster.yaml say else.

    `named` is the section of adapters where it has more than those that can be served.
    """
    from cluster.config_file import load_cluster_config

    data = {
        "model": {"path": str(model_dir), "name": "demo", "dtype": "float32", "tool_call_parser": "qwen25"},
        "engine": {
            "device": "cpu",
            "max_total_tokens": 16384,
            "max_running_requests": 32,
            "chunked_prefill_tokens": CHUNK_TOKENS,
            "context_length": 2048,
        },
        "router": {"port": 0, "max_body_bytes": 1024 * 1024},
        "workers": {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}},
        "adapters": named or {name: {"path": str(path)} for name, path in adapters.items()},
        **sections,
    }
    path = root / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    config = with_ports(load_cluster_config(path))  # chosen here, so that tests know them
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    output = (root / "up.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "up", "--config", str(path)], stdout=output, stderr=output
    )
    running = RunningCluster(
        url=f"http://{config.router.host}:{config.router.port}",
        model_dir=model_dir,
        adapters=adapters,
        logs=root / "logs",
        config=config,
        supervisor=psutil.Process(process.pid),
    )
    try:
        running.wait_ready(START_TIMEOUT_S)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            output.close()


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory, model_dir: Path, adapters: dict[str, Path], bad_adapters: dict[str, Path]
) -> Iterator[RunningCluster]:
    """The cluster that most tests share."""
    named = {name: {"path": str(path)} for name, path in {**adapters, **bad_adapters}.items()}
    with running_cluster(tmp_path_factory.mktemp("cluster"), model_dir, adapters, named) as running:
        yield running


def run_reference(model_dir: Path, requests: list[dict], folder: Path) -> list[dict]:
    """Answers of transformers and peft, computed in a clean process that knows nothing of SGLang."""
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps(requests, default=str))
    command = [sys.executable, "-m", "adapters.reference", "--model", str(model_dir)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "PRELUDE"))}
    clean["OMP_NUM_THREADS"] = "2"  # more only wait for each other where the model is this small
    subprocess.run([*command, "--requests", str(asked), "--out", str(answered)], check=True, env=clean)
    return json.loads(answered.read_text())
