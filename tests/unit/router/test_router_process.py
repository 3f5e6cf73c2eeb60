"""The router as a process: starts without workers, says so, stops when told, and imports no engine."""

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
from pathlib import Path

import yaml
from router_stand_ins import repository_root


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def get(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_start_and_stop(tmp_path: Path) -> None:
    model = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16}
    model |= {"num_attention_heads": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(model))
    port = free_port()
    cluster = {
        "model": {"path": str(tmp_path), "name": "base"},
        "router": {"port": port},
        "workers": {
            "p0": {"role": "prefill", "control_port": free_port()},
            "d0": {"role": "decode", "control_port": free_port()},
        },
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    command = [sys.executable, "-m", "router.main", "--config", str(tmp_path / "cluster.yaml")]
    process = subprocess.Popen(command, cwd=repository_root(), stderr=subprocess.PIPE, env={**os.environ})
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                status, ready = get(f"http://127.0.0.1:{port}/ready")
                break
            except OSError:
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.05)
        assert status == 503
        assert set(ready["workers"]) == {"p0", "d0"}
        assert get(f"http://127.0.0.1:{port}/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
        assert process.returncode == 0
        assert all(json.loads(line)["process"] == "router" for line in log.splitlines())
    finally:
        process.kill()
        process.wait()


def test_imports_no_engine() -> None:
    code = (
        "import sys, router.main, router.server\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'sglang', 'transformers', 'engine'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=repository_root(), check=True, timeout=60)
