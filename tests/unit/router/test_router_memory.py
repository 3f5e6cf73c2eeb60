"""A router's memory levels off: prompts that are all different, streams, and clients that leave in their middle."""

import asyncio
import random
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
import yaml
from support.adapters.tiny_model import write_model_config
from support.logged_process import logged_process
from support.router_stand_ins import WorkerStandIn, eventually, repository_root

from process.free_ports import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

NUM_REQUESTS = 400_000  # it has levelled off after half of them
AT_A_TIME = 64
EVENT_GAP_S = 0.02  # so that clients which leave after the first event leave in the answer's middle
WORDS = 400
MIB = 1 << 20


async def send(url: str, worker: WorkerStandIn, num_requests: int) -> None:
    """Completions: a quarter as streams that are left, a quarter as whole streams, the others not streamed."""
    left = iter(range(num_requests))

    async def client() -> None:
        for number in left:
            prompt = " ".join(str(random.randrange(10**6)) for _ in range(WORDS))
            body = {"model": "base", "prompt": prompt, "max_tokens": 4, "stream": number % 2 == 0}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                if number % 4 == 0:
                    await answer.content.read(10)
                    answer.close()
                else:
                    await answer.read()
            worker.engine.bodies.clear()
            worker.engine.headers.clear()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client() for _ in range(AT_A_TIME)))


async def got(url: str) -> str:
    """The page at a URL; empty until the router has started, and is ready."""
    try:
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as answer:
            return await answer.text()
    except aiohttp.ClientError:
        return ""


def num_left(metrics: str) -> float:
    """Clients that left before their answer's end, as the router counts them."""
    lines = [line for line in metrics.splitlines() if line.startswith("prelude_router_requests_total{")]
    return sum(float(line.split()[-1]) for line in lines if '"499"' in line)


async def test_it_levels_off(tmp_path: Path) -> None:
    worker, port, admin_port, control_port = WorkerStandIn("u0", "unified"), free_port(), free_port(), free_port()
    worker.engine.words, worker.engine.event_gap_s = (" hello",) * 4, EVENT_GAP_S
    write_model_config(tmp_path)
    cluster = {
        "model": {"path": str(tmp_path), "name": "base"},
        "router": {"port": port, "admin": {"port": admin_port}},
        "workers": {"u0": {"role": "unified", "control_port": control_port}},
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    url, words = f"http://127.0.0.1:{port}", ["-m", "cli.main", "router", "--config", tmp_path / "cluster.yaml"]
    await worker.start(port=control_port)
    with logged_process([sys.executable, *words], tmp_path / "router.log", cwd=repository_root()) as process:
        await eventually(lambda: got(f"{url}/ready"), bool, within_s=120)
        router = psutil.Process(process.pid)
        begin = router.memory_info().rss
        await send(url, worker, NUM_REQUESTS // 2)
        middle, descriptors = router.memory_info().rss, router.num_fds()
        await send(url, worker, NUM_REQUESTS // 2)
        end = router.memory_info().rss
        print(f"{begin / MIB:.0f}, {middle / MIB:.0f}, {end / MIB:.0f} MiB")
        assert end - middle < 4 * MIB, (begin / MIB, middle / MIB, end / MIB)
        assert router.num_fds() < descriptors + 2 * AT_A_TIME
        left = num_left(await got(f"http://127.0.0.1:{admin_port}/metrics"))
        # On a busy machine some hear of the first event when the last one has been sent.
        assert 0.8 * NUM_REQUESTS / 4 < left <= NUM_REQUESTS / 4
    await worker.stop()
