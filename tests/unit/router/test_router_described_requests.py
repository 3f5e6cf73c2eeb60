"""Requests that Schemathesis makes from the router's own OpenAPI document: as described, and as forbidden.

Every answer is as described, none is a 5xx, and afterwards the router and its workers are as before.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import ClientTimeout
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from support.router_stand_ins import ClusterStandIn, running_cluster
from yarl import URL

schemathesis = pytest.importorskip("schemathesis", reason="make test installs it")
_AT_ONCE = 20
_SHARES = {"/v1/chat/completions": 8, "/v1/completions": 8, "/v1/score": 4, "/v1/tokenize": 4, "/v1/detokenize": 2}
_NAMES = ("a0", "everywhere", "base:a0", "a0@r1", "a0@latest", "../a0", "a0/../a0", "нет", "a" * 300, "%2e%2e", "a0%00")


class Sender:
    """Sends requests, some at a time, and counts the answers."""

    def __init__(self, cluster: ClusterStandIn, runner: asyncio.Runner) -> None:
        self.statuses: Counter[int] = Counter()
        self.num_unsendable = 0
        self._cluster, self._runner = cluster, runner
        self._waiting: list[requests.PreparedRequest] = []

    def add(self, request: requests.PreparedRequest) -> None:
        self._waiting.append(request)
        if len(self._waiting) == _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._runner.run(self._send_all(waiting))

    async def _send_all(self, waiting: list[requests.PreparedRequest]) -> None:
        await asyncio.gather(*map(self._send, waiting))

    async def _send(self, request: requests.PreparedRequest) -> None:
        assert request.url is not None
        body = request.body.encode() if isinstance(request.body, str) else request.body
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        async with self._cluster.http.request(
            str(request.method), URL(request.url, encoded=True), data=body, headers=headers, timeout=ClientTimeout(30)
        ) as answer:
            content, path = await answer.read(), answer.url.path
            fields = _json_of(body) if "json" in headers.get("Content-Type", "") else None
            said = f"{request.method} {request.url} {body!r:.2000}: {answer.status} {content!r:.1000}"
            assert answer.status < 500, said
            self._cluster.described.check(
                str(request.method), path, answer.status, answer.headers.get("content-type", ""), content, fields
            )
            self.statuses[answer.status] += 1


def _json_of(body: bytes | None) -> Any:
    try:
        return json.loads(body or b"")
    except ValueError:
        return None


def _operations(cluster: ClusterStandIn) -> Iterator[tuple[Any, int]]:
    """Each operation of the document, and its share of the requests."""
    schema = schemathesis.openapi.from_dict(cluster.described.document)
    for found in schema.get_all_operations():
        operation = found.ok()
        yield operation, _SHARES.get(operation.path, 1)


def _generate(operation: Any, mode: Any, count: int, sender: Sender, url: str) -> None:
    """Send `count` requests of the operation; none, if the mode has nothing to vary in it."""

    @seed(count)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        name = _NAMES[sum(sender.statuses.values()) % len(_NAMES)]
        if "name" in (case.path_parameters or {}) and hash(str(case.path_parameters)) % 2:
            case.path_parameters["name"] = name
        if isinstance(case.body, dict) and mode.is_positive and isinstance(case.body.get("model"), str):
            case.body["model"] = "base"  # or hardly any would be known
            if isinstance(case.body.get("adapter"), str):
                case.body["adapter"] = name
        try:
            sender.add(requests.Request(**case.as_transport_kwargs(url)).prepare())
        except (UnicodeError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            sender.num_unsendable += 1  # no client could send it

    try:
        send()
    except Unsatisfiable:
        return


def check(count: int, folder: Path) -> Counter[int]:
    warnings.simplefilter("ignore")  # Schemathesis's, about formats that it has no examples of
    with asyncio.Runner() as runner:
        manager = running_cluster(1, 1, 1, folder=folder, management=True)
        cluster = runner.run(manager.__aenter__())
        try:
            sender = Sender(cluster, runner)
            operations = [*_operations(cluster)]
            total = 2 * sum(share for _, share in operations)
            for operation, share in operations:
                for mode in schemathesis.GenerationMode:
                    _generate(operation, mode, max(1, count * share // total), sender, cluster.url)
            sender.flush()
            runner.run(_is_unharmed(cluster))
            return sender.statuses
        finally:
            runner.run(manager.__aexit__(None, None, None))


async def _is_unharmed(cluster: ClusterStandIn) -> None:
    status, page = await cluster.admin("/ready")
    assert status == 200
    assert all(worker["ready"] for worker in page["workers"].values())
    assert (await cluster.admin("/debug/requests"))[1]["requests"] == []
    assert (await cluster.post(prompt="Hi"))[0] == 200
    assert not any(worker.engine.num_running for worker in cluster.workers)


@pytest.mark.slow
def test_described_and_forbidden_requests(tmp_path: Path):
    statuses = check(600, tmp_path)
    assert statuses[200] > 30
    assert statuses[400] > 100


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_described_and_forbidden_requests(tmp_path: Path):
    statuses = check(100_000, tmp_path)
    print(f"{statuses.total()} requests: {dict(statuses)}")
    assert statuses.total() > 90_000
