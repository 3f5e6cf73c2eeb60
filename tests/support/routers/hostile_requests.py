"""Sends many hostile requests to a router with stand-in workers: no 5xx, errors with a reason, nothing left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientTimeout
from support.router_stand_ins import ClusterStandIn, running_cluster
from support.router_stand_ins.cluster import check_error
from yarl import URL

_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class HostileRequest:
    method: str
    path: str  # with the query, percent-encoded
    headers: Mapping[str, str]
    body: bytes | None


class Sender:
    """Sends requests, some at a time, and counts the answers. Raises AssertionError at the first that is wrong."""

    def __init__(self, cluster: ClusterStandIn, runner: asyncio.Runner) -> None:
        self.url = cluster.url
        self.statuses: Counter[int] = Counter()
        self._cluster, self._runner = cluster, runner
        self._waiting: list[HostileRequest] = []

    def add(self, request: HostileRequest) -> None:
        self._waiting.append(request)
        if len(self._waiting) == _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._runner.run(self._send_all(waiting))

    async def _send_all(self, waiting: list[HostileRequest]) -> None:
        await asyncio.gather(*map(self._send, waiting))
        for worker in self._cluster.workers:
            worker.engine.bodies.clear()
            worker.engine.headers.clear()

    async def _send(self, request: HostileRequest) -> None:
        url = URL(f"{self.url}{request.path}", encoded=True)
        async with self._cluster.http.request(
            request.method, url, data=request.body, headers=request.headers, timeout=ClientTimeout(30)
        ) as answer:
            content = await answer.read()
            assert answer.status < 500, f"{request!r:.3000}: {answer.status} {content!r:.1000}"
            check_error(answer.status, content)
            self.statuses[answer.status] += 1


@contextmanager
def sending(folder: Path) -> Iterator[Sender]:
    """A sender to a router whose workers are stand-ins. Afterwards all are as ready as before, with nothing to do."""
    with asyncio.Runner() as runner:
        manager = running_cluster(1, 1, 1, folder=folder, management=True)
        cluster = runner.run(manager.__aenter__())
        try:
            sender = Sender(cluster, runner)
            yield sender
            sender.flush()
            runner.run(_is_unharmed(cluster))
        finally:
            runner.run(manager.__aexit__(None, None, None))


async def _is_unharmed(cluster: ClusterStandIn) -> None:
    status, page = await cluster.admin("/ready")
    assert status == 200
    assert all(worker["ready"] for worker in page["workers"].values())
    assert (await cluster.admin("/debug/requests"))[1]["requests"] == []
    assert (await cluster.post(prompt="Hi"))[0] == 200
    assert not any(worker.engine.num_running for worker in cluster.workers)
