"""Engines that are killed or hang: requests end, the worker comes back, later requests succeed.

`test_chaos.py` (long) kills and stops every process of every layout. In `make test`, adapters/test_managed_adapters.py
kills the server and the agent of a prefill worker.
"""

from __future__ import annotations

import json
import time

import httpx
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


def test_a_decode_engine_that_is_killed(cluster: RunningCluster):
    """Its streams end with an error, in time."""
    cluster.wait_ready(BACK_WITHIN_S)
    before = {adapter: answer_of(cluster, adapter=adapter) for adapter in ("a0", "a2")}
    server, killed_at, errors = cluster.engine("decode-0").pid, 0.0, []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for number, line in enumerate(answer.iter_lines()):
            if number == 10:
                cluster.engine_parts("decode-0")["scheduler"].kill()
                killed_at = time.monotonic()
            if line.startswith("data: {") and '"error"' in line:
                assert time.monotonic() - killed_at < ERROR_WITHIN_S
                errors.append(json.loads(line.removeprefix("data: "))["error"])
            assert errors or line != "data: [DONE]"
    assert [bool(error["code"] and error["message"]) for error in errors] == [True]
    cluster.wait_for_another(lambda: cluster.engine("decode-0"), server, BACK_WITHIN_S)
    cluster.wait_ready(BACK_WITHIN_S)
    assert {adapter: answer_of(cluster, adapter=adapter) for adapter in before} == before


def test_a_prefill_engine_that_is_stopped(cluster: RunningCluster):
    """SIGSTOP: it is out of placement, then started again, and nobody waits for it any longer."""
    cluster.wait_ready(BACK_WITHIN_S)
    before = answer_of(cluster, adapter="a0")
    server = cluster.engine("prefill-0")
    cluster.engine_parts("prefill-0")["scheduler"].suspend()
    stopped_at = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**ENDLESS, "max_tokens": 8}, timeout=BACK_WITHIN_S)
    waited_s = time.monotonic() - stopped_at
    assert answer.status_code in (502, 503)
    assert waited_s < OUT_WITHIN_S
    while httpx.get(f"{cluster.worker_url('prefill-0')}/ready", timeout=10).status_code == 200:
        assert time.monotonic() - stopped_at < OUT_WITHIN_S
        time.sleep(0.1)
    out_s = time.monotonic() - stopped_at
    assert "has shown no progress" in (cluster.logs / "prefill-0.log").read_text()
    cluster.wait_for_another(lambda: cluster.engine("prefill-0"), server.pid, RESTARTED_WITHIN_S)
    restarted_s = time.monotonic() - stopped_at
    cluster.wait_ready(START_TIMEOUT_S)
    print(
        f"the client waited {waited_s:.1f} s, out of placement after {out_s:.1f} s, started again after "
        f"{restarted_s:.1f} s, ready after {time.monotonic() - stopped_at:.1f} s"
    )
    assert restarted_s < RESTARTED_WITHIN_S
    assert answer_of(cluster, adapter="a0") == before  # it is gone with the engine, and comes back when it is asked for
