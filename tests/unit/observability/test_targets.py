"""What a Prometheus with one line of configuration scrapes, as the router's admin listener says."""

import asyncio
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer
from support.observability.prometheus import running_prometheus
from support.router_stand_ins import eventually, running_cluster
from support.waiting import wait_until

from router.api.training import TrainerAddress


async def page(request: web.Request) -> web.Response:
    return web.Response(text=f'seen{{path="{request.path}"}} 1\n', content_type="text/plain")


async def test_one_line_scrapes_all(tmp_path: Path):
    app = web.Application()
    app.add_routes([web.get("/metrics", page), web.get("/engine/metrics", page)])
    trainer = TrainerAddress("http://127.0.0.1:8100", "secret")
    async with TestServer(app) as agents, running_cluster(1, 1, trainer=trainer) as cluster:
        for worker in (*cluster.prefill, *cluster.decode):
            worker.described["metrics_port"] = agents.port if worker.role == "prefill" else 70_000  # which is no port
            await worker.restart_agent()
        url = f"{cluster.admin_url}/metrics/targets"
        admin, agent = cluster.admin_url.partition("//")[2], f"127.0.0.1:{agents.port}"
        expected = [
            {"targets": [admin], "labels": {"job": "prelude-router"}},
            {"targets": [agent], "labels": {"job": "prelude-workers"}},
            {"targets": ["127.0.0.1:8101"], "labels": {"job": "prelude-trainer"}},
            {"targets": [agent], "labels": {"job": "prelude-engines", "__metrics_path__": "/engine/metrics"}},
        ]
        await eventually(lambda: cluster.admin("/metrics/targets"), lambda found: found == (200, expected))
        assert (await cluster.get("/metrics/targets"))[0] == 404  # nothing for clients

        def scrape() -> dict[tuple[str, str], str]:
            with running_prometheus(tmp_path, url) as prometheus:
                wait_until(lambda: sorted(prometheus.targets().values()) == ["down", "up", "up", "up"])
                return prometheus.targets()

        assert set(await asyncio.to_thread(scrape)) == {
            ("prelude-router", f"{cluster.admin_url}/metrics"),
            ("prelude-workers", f"http://{agent}/metrics"),
            ("prelude-trainer", "http://127.0.0.1:8101/metrics"),  # where none is
            ("prelude-engines", f"http://{agent}/engine/metrics"),
        }
