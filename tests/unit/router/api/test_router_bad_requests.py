"""Requests that are refused, and clients that leave or do not read."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from support.router_stand_ins import (
    ClusterStandIn,
    eventually,
    hangs,
    post_bytes,
    running_cluster,
    stops_after,
)


async def ask(
    cluster: ClusterStandIn, method: str, path: str = "/v1/completions", data: Any = None, **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    """Status, parsed answer and headers."""
    headers = {"content-type": "application/json", **headers}
    async with cluster.http.request(method, cluster.url + path, data=data, headers=headers) as response:
        return response.status, await response.json(), response.headers


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_both_engines_abort(self, stream: bool, cluster: ClusterStandIn) -> None:
        cluster.prefill[0].engine.behaviours = [hangs]
        cluster.decode[0].engine.behaviours = [stops_after(2) if stream else hangs]
        asking = asyncio.create_task(cluster.post(prompt="Hi", stream=stream))
        await cluster.has_phase("relaying" if stream else "waiting_first_event")
        await eventually(lambda: asyncio.sleep(0, [w.engine.num_running for w in cluster.workers]), all)
        asking.cancel()
        for worker in cluster.workers:
            rid = worker.engine.requests[0]["rid"]
            await eventually(lambda w=worker: asyncio.sleep(0, w.engine.aborted), lambda a, r=rid: r in a)
            await eventually(lambda w=worker: asyncio.sleep(0, w.engine.num_running), lambda n: n == 0)
        await cluster.is_idle()
        page = await cluster.metrics_page()
        assert 'prelude_router_requests_total{endpoint="completions",status="499"} 1.0' in page
        assert 'prelude_router_worker_legs_in_flight{worker="d0"} 0.0' in page

    async def test_while_prefills_last_word_is_awaited(self, cluster: ClusterStandIn) -> None:
        cluster.prefill[0].engine.behaviours = [hangs]  # decode's answer is complete before prefill's
        asking = asyncio.create_task(cluster.post(prompt="Hi"))
        await cluster.has_phase("done")
        asking.cancel()
        await cluster.is_idle()
        await eventually(lambda: asyncio.sleep(0, cluster.prefill[0].engine.aborted), bool)
        page = await cluster.metrics_page()
        for worker in ("p0", "d0"):
            assert f'prelude_router_worker_legs_in_flight{{worker="{worker}"}} 0.0' in page

    async def test_client_that_does_not_read(self) -> None:
        async with running_cluster(event_gap_timeout_s=0.5) as cluster:
            cluster.decode[0].engine.words = ("x" * 100_000,) * 200
            _, writer = await cluster.open(post_bytes(prompt="Hi", stream=True), limit=1024)
            await eventually(lambda: asyncio.sleep(0, len(cluster.decode[0].engine.aborted)), bool)
            writer.close()


class TestBadInput:
    async def test_bodies(self) -> None:
        """test_router_validation.py has more that are no JSON."""
        bodies: dict[bytes, tuple[int, str]] = {
            b"{": (400, "invalid_body"),
            b'{"model": "base", "prompt": "Hi", "lora_path": "x"}': (400, "invalid_field"),
            b'{"model": "base", "prompt": "' + b"x" * 5000 + b'"}': (413, "body_too_large"),
        }

        async def in_parts(body: bytes) -> AsyncIterator[bytes]:  # so no size is declared
            yield body[:10]
            await asyncio.sleep(0.1)  # the router begins to read; the answer is the same if it does not
            yield body[10:]

        async with running_cluster(max_body_bytes=1024) as cluster:
            for body, expected in bodies.items():
                for sent in (body, in_parts(body)):
                    status, answer, headers = await ask(cluster, "POST", data=sent)
                    assert (status, answer["error"]["code"]) == expected
                    assert answer["error"]["type"] == "invalid_request_error"
                    assert "x-request-id" in headers
            assert not cluster.prefill[0].engine.bodies
            assert (await cluster.post(prompt="Hi"))[0] == 200

    async def test_slow_body(self) -> None:
        async def chunks() -> Any:
            yield b"{"
            await asyncio.sleep(5)

        async with running_cluster(body_timeout_s=0.2) as cluster:
            status, answer, _ = await ask(cluster, "POST", data=chunks())
            assert (status, answer["error"]["code"]) == (408, "body_too_slow")

    async def test_requests(self, cluster: ClusterStandIn) -> None:
        requests: tuple[tuple[str, str, dict[str, str], int, str], ...] = (
            ("POST", "/v1/nothing", {}, 404, "unknown_path"),
            ("GET", "/v1/completions", {}, 405, "wrong_method"),
            ("POST", "/v1/models", {}, 405, "wrong_method"),
            ("GET", "/v1/models/a9", {}, 404, "model_not_found"),
            ("POST", "/v1/completions", {"content-type": "text/plain"}, 400, "invalid_body"),
            ("POST", "/v1/completions", {"content-encoding": "br"}, 400, "invalid_body"),
        )
        for method, path, headers, status, code in requests:
            data = b"{}" if method == "POST" else None
            found, answer, answer_headers = await ask(cluster, method, path, data=data, **headers)
            assert (found, answer["error"]["code"]) == (status, code)
            assert "x-request-id" in answer_headers

    async def test_wrong_paths_name_the_remedy(self, cluster: ClusterStandIn) -> None:
        for method, path, remedy in (
            ("POST", "/chat/completions", "/chat/completions; did you mean /v1/chat/completions?"),
            ("POST", "/v1/v1/completions", "; did you mean /v1/completions?"),
            ("GET", "/v1/model", "; did you mean /v1/models?"),
            ("GET", "/metrics", "/metrics: it is on the router's admin listener"),
            ("GET", "/" + "x" * 5000, f"there is nothing at /{'x' * 99}; docs/api.md has the paths"),
            ("GET", "/v1/completions", "/v1/completions does not take GET; it takes POST"),
        ):
            _, answer, _ = await ask(cluster, method, path, data=b"{}" if method == "POST" else None)
            assert answer["error"]["message"].endswith(remedy), answer
