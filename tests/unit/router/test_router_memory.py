"""A router's memory levels off: prompts that are all different, streams, and clients that leave in their middle."""

import asyncio
import random
from pathlib import Path

import aiohttp
import psutil
import pytest
import requests
import yaml

from bench.systems.mock_worker import HOST
from bench.systems.routers import MODEL, our_router, running_workers, workers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NUM_REQUESTS = 400_000  # it has levelled off after half of them
AT_A_TIME = 64
EVENT_GAP_S = 0.02  # so that clients which leave after the first event leave in the answer's middle
WORDS = 400
MIB = 1 << 20


async def send(url: str, num_requests: int) -> None:
    """Completions: a quarter as streams that are left, a quarter as whole streams, the others not streamed."""
    left = iter(range(num_requests))

    async def client() -> None:
        for number in left:
            prompt = " ".join(str(random.randrange(10**6)) for _ in range(WORDS))
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": number % 2 == 0}
            async with session.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                if number % 4 == 0:
                    await answer.content.read(10)
                    answer.close()
                else:
                    await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client() for _ in range(AT_A_TIME)))


def num_left(cluster_yaml: Path) -> float:
    """Clients that left before their answer's end, as the router counts them."""
    port = yaml.safe_load(cluster_yaml.read_text())["router"]["admin"]["port"]
    lines = requests.get(f"http://{HOST}:{port}/metrics", timeout=30).text.splitlines()
    counts = [
        line.split()[-1] for line in lines if line.startswith("prelude_router_requests_total{") and '"499"' in line
    ]
    return sum(map(float, counts))


async def test_it_levels_off(tmp_path: Path) -> None:
    settings = workers(num_events=4, event_gap_s=EVENT_GAP_S)
    with running_workers(settings, tmp_path):
        async with our_router(settings, tmp_path) as router:
            url, process = f"http://{HOST}:{router.port}/v1/completions", psutil.Process(router.pid)
            begin = process.memory_info().rss
            await send(url, NUM_REQUESTS // 2)
            middle, descriptors = process.memory_info().rss, process.num_fds()
            await send(url, NUM_REQUESTS // 2)
            end = process.memory_info().rss
            print(f"{begin / MIB:.0f}, {middle / MIB:.0f}, {end / MIB:.0f} MiB")
            assert end - middle < 4 * MIB, (begin / MIB, middle / MIB, end / MIB)
            assert process.num_fds() < descriptors + 2 * AT_A_TIME
            left = await asyncio.to_thread(num_left, tmp_path / "ours/cluster.yaml")
            # On a busy machine some hear of the first event when the last one has been sent.
            assert 0.8 * NUM_REQUESTS / 4 < left <= NUM_REQUESTS / 4
