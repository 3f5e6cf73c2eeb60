"""An agent answers for its engine's metrics: within a time, a size and a rate."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from support.clusters.paired_agents import decode_agent, running
from support.engines.engine_stand_in import Engine

from cluster.agent.engine_metrics import FRESH_S, EngineMetrics
from cluster.config.workers import ENGINE_METRICS_PATH
from engine import client as client_module
from engine.client import EngineClient
from engine.errors import EngineRefused, EngineUnreachable
from engine.supervisor import EngineSnapshot, EngineStatus

# What Prometheus 2 asks for: an engine would answer it with `sglang_` names.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


class Scraped(Engine):
    """An engine with SGLang's way of answering /metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        Gauge("sglang:num_queue_reqs", "waiting", ("model_name",), registry=self.registry).labels("demo").set(3)
        self.status = 200
        self.num_asked = 0
        self.is_silent = False

    async def metrics(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.is_silent:
            await asyncio.Event().wait()
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return web.Response(body=encoder(self.registry), headers={"content-type": content_type}, status=self.status)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/metrics", self.metrics)]


async def test_one_question_serves_all_who_ask_within_a_second():
    now, answers = [0.0], iter([b"one", EngineUnreachable("gone"), b"three"])
    asked, may_answer = [], asyncio.Event()

    async def ask() -> bytes:
        asked.append(now[0])
        await may_answer.wait()
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    metrics = EngineMetrics(ask, lambda: now[0])
    crowd = [asyncio.create_task(metrics.page()) for _ in range(20)]
    await asyncio.sleep(0)
    crowd.pop().cancel()  # one of those who wait leaves
    may_answer.set()
    assert await asyncio.gather(*crowd) == [b"one"] * 19
    assert await metrics.page() == b"one"
    assert len(asked) == 1
    now[0] = FRESH_S
    for _ in range(2):  # the lack of an answer, too
        with pytest.raises(EngineUnreachable, match="gone"):
            await metrics.page()
    assert len(asked) == 2
    now[0] = 2 * FRESH_S
    assert await metrics.page() == b"three"


async def test_whoever_asks_first_may_leave():
    may_answer = asyncio.Event()

    async def ask() -> bytes:
        await may_answer.wait()
        return b"page"

    metrics = EngineMetrics(ask)
    first, second = (asyncio.create_task(metrics.page()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    may_answer.set()
    assert await second == b"page"


async def test_the_client_bounds_size_and_time(monkeypatch: pytest.MonkeyPatch):
    async with Scraped().served() as engine, aclosing(EngineClient(engine.url)) as client:
        page = await client.metrics()
        assert b'sglang:num_queue_reqs{model_name="demo"} 3.0' in page
        monkeypatch.setattr(client_module, "MAX_METRICS_BYTES", len(page) - 1)
        with pytest.raises(EngineRefused, match=f"more than {len(page) - 1} bytes"):
            await client.metrics()
        engine.status = 500
        with pytest.raises(EngineRefused, match="/metrics answered 500"):
            await client.metrics()
        engine.is_silent = True
        monkeypatch.setattr(client_module, "_METRICS_TIMEOUT_S", 0.05)
        with pytest.raises(EngineUnreachable):
            await client.metrics()


async def test_the_agent_answers_for_its_engine(tmp_path: Path):
    agent = decode_agent(tmp_path)
    url = f"http://{agent.worker.host}:{agent.worker.metrics_port}{ENGINE_METRICS_PATH}"

    async def scrape() -> tuple[int, str]:
        agent._engine_metrics._stale_at = 0.0
        async with (
            aiohttp.ClientSession(headers={"accept": PROMETHEUS_2}) as session,
            session.get(url) as answer,
        ):
            assert answer.content_type == "text/plain"
            return answer.status, await answer.text()

    async with Scraped().served() as engine, running(agent, engine):
        status, page = await scrape()
        assert status == 200
        assert 'sglang:num_queue_reqs{model_name="demo"} 3.0' in page
        agent._engine_changed(EngineSnapshot(EngineStatus.DOWN, "", (), 1, "its scheduler process ended"))
        assert await scrape() == (503, "the engine has no metrics now: its scheduler process ended\n")
        assert engine.num_asked == 1
        agent._engine_changed(EngineSnapshot(EngineStatus.UP, "two", (), 1, ""))
        engine.status = 404
        assert await scrape() == (503, "the engine has no metrics now: /metrics answered 404\n")
