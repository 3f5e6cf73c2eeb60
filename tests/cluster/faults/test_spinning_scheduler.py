"""A real scheduler that computes without end: out of placement, started again, and nobody waits for it any longer."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.clusters.running_cluster import START_TIMEOUT_S, RunningCluster, running_cluster

pytestmark = pytest.mark.long

HANG_S = 2.0  # fifteen times that, of the processor, for a scheduler that computes; thirty until it is restarted
OUT_WITHIN_S = 120.0
RESTARTED_WITHIN_S = 240.0
PROMPT = {"model": "demo", "prompt": "The sea " * 20, "temperature": 0, "ignore_eos": True}
# Python runs handlers of signals in the main thread, which is the scheduler's: it never returns to its loop.
SPINNER = """
import signal

def spin(*_):
    while True:
        pass

signal.signal(signal.SIGUSR2, spin)
"""


@pytest.fixture
def cluster(tmp_path: Path, model_dir: Path, adapters: dict[str, Path], monkeypatch) -> Iterator[RunningCluster]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SPINNER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    engine = {"device": "cpu", "max_total_tokens": 8192, "context_length": 2048, "hang_timeout_s": HANG_S}
    workers = {"unified-0": {"role": "unified"}}
    named = {"a0": adapters["a0"]}
    with running_cluster(tmp_path, model_dir, named, engine=engine, workers=workers) as running:
        yield running


def answer(cluster: RunningCluster) -> Any:
    body = {**PROMPT, "adapter": "a0", "max_tokens": 8}
    found = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"]


def test_a_scheduler_that_spins_inside_a_batch(cluster: RunningCluster):
    before = answer(cluster)
    scheduler = cluster.engine_parts("unified-0")["scheduler"]
    errors: list[dict] = []
    is_generating = threading.Event()

    def stream() -> None:
        body = {**PROMPT, "max_tokens": 1800, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=400) as events:
            for line in events.iter_lines():
                is_generating.set()
                if '"error"' in line:
                    errors.append(json.loads(line.removeprefix("data: "))["error"])

    client = threading.Thread(target=stream)
    client.start()
    assert is_generating.wait(60)
    scheduler.send_signal(signal.SIGUSR2)
    spins_at = time.monotonic()
    ready = f"{cluster.worker_url('unified-0')}/ready"
    while (page := httpx.get(ready, timeout=30)).status_code == 200:
        assert time.monotonic() - spins_at < OUT_WITHIN_S
        time.sleep(0.1)
    assert "scheduler-0 has shown no progress for" in page.text
    assert "though it computes" in page.text
    assert scheduler.is_running()  # so far it is only out of placement, and the stream waits for it
    assert not errors
    out_s = time.monotonic() - spins_at
    psutil.wait_procs([scheduler], timeout=RESTARTED_WITHIN_S - out_s)
    restarted_s = time.monotonic() - spins_at
    assert restarted_s < RESTARTED_WITHIN_S
    client.join(30)
    assert [error["code"] for error in errors] == ["worker_lost"]
    cluster.wait_ready(START_TIMEOUT_S)
    print(f"out of placement after {out_s:.1f} s, started again after {restarted_s:.1f} s")
    assert answer(cluster) == before
