"""Two tenants at one real engine: what one's load does to the other's wait for its first token.

A cluster of its own, once with turns and once without: the second shows that it is they.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median, quantiles

import aiohttp
import httpx
import pytest
from support.clusters.running_cluster import ENGINE, RunningCluster, running_cluster
from support.waiting import wait_until

from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Scope

pytestmark = pytest.mark.long

PROMPT_TOKENS = range(500, 1501)
SMALL_PER_S = 1.0  # requests; a few percent of what the engine can do
TIMES = 100
SETTLE_S = 5.0  # of the large tenant's load, before what is measured
GIVE_UP_S = 20.0  # without a first token
QUEUE = {"max_requests": 50, "timeout_s": 10}


class Tenant:
    """Sends streamed requests with one key, and notes when their first events came."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str, seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self._random = Random(seed)
        self.first_s: list[float] = []
        self.num_refused = 0

    async def send(self, per_s: float, seconds: float) -> None:
        """Poisson arrivals. Ends with the last answer."""
        ends_at = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while (gap_s := self._random.expovariate(per_s)) < ends_at - time.monotonic():
                await asyncio.sleep(gap_s)
                group.create_task(self._request())

    async def _request(self) -> None:
        body = body_of(prompt(self._random, self._random.choice(PROMPT_TOKENS)))
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(GIVE_UP_S) as limit:
                async with self._session.post(self._url, json=body, headers=self._headers) as answer:
                    if answer.status == 429:
                        self.num_refused += 1
                        return
                    assert answer.status == 200, await answer.text()
                    await answer.content.readline()
                    self.first_s.append(time.monotonic() - began_at)
                    limit.reschedule(None)
                    await answer.read()
        except TimeoutError:
            self.first_s.append(GIVE_UP_S)


def prompt(random: Random, num_tokens: int) -> list[int]:
    return [random.randrange(10, 600) for _ in range(num_tokens)]


def body_of(token_ids: list[int]) -> dict[str, object]:
    return {"model": "demo", "prompt": token_ids, "max_tokens": 4, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module", params=["in turn", "as they come"])
def fair(request, tmp_path_factory, model_dir: Path) -> Iterator[tuple[bool, RunningCluster, list[str]]]:
    """Whether tenants take turns, the cluster, and the keys of the small and of the large one."""
    root = tmp_path_factory.mktemp("fair")
    is_fair, catalog_url = request.param == "in turn", f"sqlite:///{root / 'catalog.db'}"
    keys = new_keys(catalog_url)
    sections = {
        "workers": {"unified-0": {"role": "unified"}},
        "engine": {**ENGINE, "max_total_tokens": 65536, "chunked_prefill_tokens": 2048},
        "router": {"port": 0, "auth": {}, "quotas": {"fair_queue": QUEUE if is_fair else None}},
        "catalog": {"url": catalog_url},
    }
    with running_cluster(root, model_dir, {}, **sections) as cluster:
        wait_until(lambda: all(is_known(cluster, key) for key in keys))
        yield is_fair, cluster, keys


def new_keys(catalog_url: str) -> list[str]:
    catalog = SqlCatalog.open(catalog_url)
    try:
        of = catalog.keys.create
        return [of(name, "test", {Scope.INFER}, expires_at=None, by="test")[1] for name in ("small", "large")]
    finally:
        catalog.close()


def is_known(cluster: RunningCluster, key: str) -> bool:
    return httpx.get(f"{cluster.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


async def measured(url: str, keys: list[str], phase_s: float) -> tuple[list[float], list[float], Tenant]:
    """The small tenant's waits alone, and beside the large one, which is the third."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        warm, alone, beside = (Tenant(session, url, keys[0], seed) for seed in (1, 2, 3))
        large = Tenant(session, url, keys[1], 4)
        await warm.send(SMALL_PER_S, SETTLE_S)
        await alone.send(SMALL_PER_S, phase_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(large.send(TIMES * SMALL_PER_S, SETTLE_S + phase_s))
            await asyncio.sleep(SETTLE_S)
            group.create_task(beside.send(SMALL_PER_S, phase_s))
    return alone.first_s, beside.first_s, large


def p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20)[-1]


def told(seconds: list[float]) -> str:
    return f"{median(seconds):.3f} and {p95(seconds):.3f} s of {len(seconds)}"


def test_a_tenant_beside_100_times_its_load(fair: tuple[bool, RunningCluster, list[str]]):
    is_fair, cluster, keys = fair
    alone_s, beside_s, large = asyncio.run(measured(cluster.url, keys, phase_s=60 if is_fair else 15))
    times = p95(beside_s) / p95(alone_s)
    print(
        f"turns: {is_fair}; the small tenant's first token, p50 and p95: alone {told(alone_s)}, beside "
        f"{told(beside_s)}, {times:.2f} times; the large one's {told(large.first_s)}, {large.num_refused} refused"
    )
    if is_fair:
        assert times <= 1.5
        assert large.num_refused  # the engine was saturated
    else:
        assert times > 3
