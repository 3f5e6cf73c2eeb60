"""Engines that are killed or hang: requests end, the worker comes back, later requests succeed."""

from __future__ import annotations

import json
import threading
import time

import httpx
import psutil
import pytest
from support.clusters.running_cluster import START_TIMEOUT_S, RunningCluster

pytestmark = pytest.mark.kills_the_cluster

ERROR_WITHIN_S = 10.0
BACK_WITHIN_S = 90.0
OUT_WITHIN_S = 30.0  # 10 to 12 s on a machine that is not overloaded
RESTARTED_WITHIN_S = 60.0
ENDLESS = {"model": "demo", "prompt": "The sea " * 20, "max_tokens": 1800, "ignore_eos": True, "temperature": 0}


def answer_of(cluster: RunningCluster, **fields) -> str:
    body = {"model": "demo", "prompt": "The sea", "max_tokens": 8, "temperature": 0, **fields}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("worker", "process"),
    [
        ("decode-0", "scheduler"),
        ("prefill-0", "server"),
        pytest.param("decode-0", "server", marks=pytest.mark.long),
        pytest.param("prefill-0", "scheduler", marks=pytest.mark.long),
    ],
)
def test_engine_killed(cluster: RunningCluster, worker: str, process: str):
    cluster.wait_ready(BACK_WITHIN_S)
    before = {adapter: answer_of(cluster, adapter=adapter) for adapter in ("a0", "a2")}
    victim_server = cluster.engine(worker).pid
    if worker == "decode-0":
        error = error_of_a_stream_whose_decode_dies(cluster, cluster.engine_parts(worker)[process])
    else:
        error = error_of_requests_whose_prefill_dies(cluster, cluster.engine_parts(worker)[process])
    assert error["code"]
    assert error["message"]
    cluster.wait_for_another(lambda: cluster.engine(worker), victim_server, BACK_WITHIN_S)
    cluster.wait_ready(BACK_WITHIN_S)
    # The adapters are gone with the prefill engine; they come back when they are asked for.
    assert {adapter: answer_of(cluster, adapter=adapter) for adapter in before} == before


@pytest.mark.parametrize(
    ("worker", "process"),
    [
        ("prefill-0", "scheduler"),
        *(
            pytest.param(worker, process, marks=pytest.mark.long)
            for worker in ("prefill-0", "decode-0")
            for process in ("server", "scheduler", "detokenizer")
            if (worker, process) != ("prefill-0", "scheduler")
        ),
    ],
)
def test_engine_stopped(cluster: RunningCluster, worker: str, process: str):
    """SIGSTOP: it is out of placement, then started again, and nobody waits for it any longer."""
    cluster.wait_ready(BACK_WITHIN_S)
    before = answer_of(cluster, adapter="a0")
    victim, server = cluster.engine_parts(worker)[process], cluster.engine(worker)
    victim.suspend()
    stopped_at = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**ENDLESS, "max_tokens": 8}, timeout=BACK_WITHIN_S)
    waited_s = time.monotonic() - stopped_at
    if answer.status_code != 200:  # it needs no detokenizer of a prefill engine that only sends KV
        assert answer.status_code in (502, 503)
        assert waited_s < OUT_WITHIN_S
    while httpx.get(f"{cluster.worker_url(worker)}/ready", timeout=10).status_code == 200:
        assert time.monotonic() - stopped_at < OUT_WITHIN_S
        time.sleep(0.1)
    out_s = time.monotonic() - stopped_at
    assert "has shown no progress" in (cluster.logs / f"{worker}.log").read_text()
    cluster.wait_for_another(lambda: cluster.engine(worker), server.pid, RESTARTED_WITHIN_S)
    restarted_s = time.monotonic() - stopped_at
    cluster.wait_ready(START_TIMEOUT_S)
    print(
        f"{worker} {process}: the client waited {waited_s:.1f} s, out of placement after {out_s:.1f} s, started again "
        f"after {restarted_s:.1f} s, ready after {time.monotonic() - stopped_at:.1f} s"
    )
    assert restarted_s < RESTARTED_WITHIN_S
    assert answer_of(cluster, adapter="a0") == before


def error_of_a_stream_whose_decode_dies(cluster: RunningCluster, victim: psutil.Process) -> dict:
    killed_at = None
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for number, line in enumerate(answer.iter_lines()):
            if number == 10:
                victim.kill()
                killed_at = time.monotonic()
            if line.startswith("data: {") and '"error"' in line:
                assert time.monotonic() - killed_at < ERROR_WITHIN_S
                return json.loads(line.removeprefix("data: "))["error"]
            assert line != "data: [DONE]"
    pytest.fail("the stream just stopped")


def error_of_requests_whose_prefill_dies(cluster: RunningCluster, victim: psutil.Process) -> dict:
    """Requests whose long prompts are being read when the engine dies."""
    answers: list[tuple[float, httpx.Response]] = []

    def ask(number: int) -> None:
        body = {**ENDLESS, "prompt": [17 + (i * 7 + number) % 500 for i in range(1900)], "max_tokens": 4}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        answers.append((time.monotonic(), answer))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    victim.kill()
    killed_at = time.monotonic()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    failed = [answer for _, answer in answers if answer.status_code != 200]
    assert failed, "the engine died too late to disturb anybody"
    assert max(at for at, _ in answers) - killed_at < ERROR_WITHIN_S
    assert {answer.status_code for answer in failed} <= {502, 503}
    return failed[0].json()["error"]


def test_agent_killed(cluster: RunningCluster):
    """The supervisor starts an agent again, its engine dies with it, and everything comes back."""
    cluster.wait_ready(BACK_WITHIN_S)
    before = answer_of(cluster, adapter="a0")
    agent, engine = cluster.process("prefill-0"), cluster.engine("prefill-0")
    agent.kill()
    psutil.wait_procs([engine], timeout=30)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    cluster.wait_for_another(lambda: cluster.engine("prefill-0"), engine.pid, BACK_WITHIN_S)
    cluster.wait_ready(BACK_WITHIN_S)
    assert answer_of(cluster, adapter="a0") == before
