"""A decode engine that is killed: requests end, the worker comes back, later requests succeed.

`test_chaos.py` (long) kills and stops every process of every layout. In `make test`, adapters/test_managed_adapters.py
stops the scheduler of a prefill worker, and kills its agent.
"""

import json
import time

import httpx
import pytest
from support.clusters.running_cluster import RunningCluster

pytestmark = pytest.mark.kills_the_cluster

ERROR_WITHIN_S = 10.0
BACK_WITHIN_S = 90.0
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
