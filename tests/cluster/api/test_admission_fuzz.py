"""Random bodies: no 5xx, no worker that stops being ready, no engine that restarts.

The seed is printed; `PRELUDE_FUZZ_SEED` repeats a run.
"""

import json
import os
import secrets
import time
from collections import Counter

import httpx
import pytest
from support.clusters.running_cluster import RunningCluster
from support.routers.random_bodies import Bodies

SECONDS = 60.0  # for one answer
JSON = {"content-type": "application/json"}


def check(cluster: RunningCluster, count: int) -> None:
    seed = int(os.environ.get("PRELUDE_FUZZ_SEED", secrets.randbits(32)))
    print(f"PRELUDE_FUZZ_SEED={seed}")
    bodies, statuses = Bodies(seed), Counter()
    slowest = (0.0, {})
    with httpx.Client(timeout=SECONDS) as client:
        for number in range(count):
            path, body = bodies.request()
            start = time.monotonic()
            answer = client.post(f"{cluster.url}/v1/{path}", content=json.dumps(body).encode(), headers=JSON)
            slowest = max(slowest, (time.monotonic() - start, body), key=lambda each: each[0])
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, f"request {number}: {body}: {answer.text}"
            if answer.status_code == 200 and body.get("stream") is True:
                is_whole = b'"error":' not in answer.content or answer.content.endswith(b"data: [DONE]\n\n")
                assert is_whole, (body, answer.text)
    print(f"{dict(statuses)}, slowest {slowest[0]:.2f} s: {slowest[1]}")
    assert statuses[200] > count // 10
    assert statuses[400] > count // 10
    cluster.wait_ready(30)
    cluster.check_no_engine_ended()


@pytest.mark.long
def test_random_bodies_harm_nobody(cluster: RunningCluster) -> None:
    check(cluster, 3000)
