"""A router without descriptors says so; its workers are not blamed, and serve as soon as it has some again."""

from __future__ import annotations

import pytest
from support.descriptors import no_descriptors
from support.router_stand_ins import running_cluster


@pytest.mark.parametrize(
    "roles", [{"num_prefill": 1, "num_decode": 2}, {"num_prefill": 0, "num_decode": 0, "num_unified": 2}]
)
async def test_a_router_without_descriptors_blames_nobody(roles: dict[str, int]) -> None:
    async with running_cluster(**roles) as cluster:
        assert (await cluster.get("/health"))[0] == 200  # the client's connection is open from here on
        with no_descriptors():
            for _ in range(6):  # three in a row would open a breaker
                status, answer, headers = await cluster.post(prompt="Hi")
                assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "router_exhausted", "1")
                assert "Too many open files" in answer["error"]["message"]
        assert not any(cluster.fleet.breaker(worker.name).is_blocking for worker in cluster.workers)
        assert (await cluster.post(prompt="Hi"))[0] == 200
        page = await cluster.metrics_page()
        assert "prelude_router_retries_total{" not in page
        exhausted = [line for line in page.splitlines() if line.startswith("prelude_router_exhausted_total{")]
        assert len(exhausted) == 1
        assert exhausted[0].startswith('prelude_router_exhausted_total{reason="emfile"} ')
