"""A client that leaves takes its request along: nothing of it stays in an engine or in the router."""

import httpx
import pytest
from support.clusters.running_cluster import RunningCluster
from support.waiting import wait_until

FREED_WITHIN_S = 2.0
ENDLESS = {"model": "demo", "prompt": "The sea " * 20, "max_tokens": 1800, "ignore_eos": True, "temperature": 0}


def in_router(cluster: RunningCluster) -> int:
    return len(httpx.get(f"{cluster.admin_url}/debug/requests").json()["requests"])


@pytest.mark.parametrize("adapter", [None, "a0"])
@pytest.mark.parametrize("n", [1, 2])
def test_disconnect_mid_stream(cluster: RunningCluster, adapter, n):
    cluster.wait_idle(10)
    body = {**ENDLESS, "stream": True, "n": n, **({"adapter": adapter} if adapter else {})}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer,
    ):
        events = answer.iter_lines()
        assert sum(1 for line, _ in zip(events, range(20), strict=False) if line) > 5
        wait_until(lambda: cluster.loads()["decode-0"][0] == n, 5)
        assert in_router(cluster) == 1
    seconds = cluster.wait_idle(FREED_WITHIN_S)
    wait_until(lambda: in_router(cluster) == 0, FREED_WITHIN_S)
    print(f"freed after {seconds:.2f} s")


def test_disconnect_before_the_first_token(cluster: RunningCluster):
    """The client leaves while its long prompt is still being read."""
    cluster.wait_idle(10)
    long = {"prompt": [17 + i % 500 for i in range(1900)], "max_tokens": 100}
    body = {**ENDLESS, **long, "stream": True, "adapter": "a0"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=0.15)
    cluster.wait_idle(FREED_WITHIN_S)
    wait_until(lambda: in_router(cluster) == 0, FREED_WITHIN_S)


def test_many_disconnects_leave_nothing(cluster: RunningCluster):
    """Clients that leave at random moments; afterwards everything still answers and is empty."""
    for number in range(12):
        body = {**ENDLESS, "adapter": f"a{number % 4}", "prompt": f"Number {number}. " * 10}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=0.02 + 0.04 * number)
    cluster.wait_idle(FREED_WITHIN_S)
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**ENDLESS, "max_tokens": 4}, timeout=60)
    assert answer.status_code == 200
    assert cluster.metric("prelude_router_requests_in_flight ") == 0
