"""Requests with an adapter: loads that are slow, refused or tried elsewhere, and wrong references."""

import json
import time
from typing import Any

import grpc
import pytest
from support.router_stand_ins import MODEL, ClusterStandIn, answers, hangs, running_cluster, streams

from adapters.errors import AdapterIncompatible
from adapters.store.errors import StoreFull, StoreUnavailable
from router.fleet import worker_link


class TestAdapters:
    async def test_refused_adapter_says_why(self) -> None:
        async with running_cluster(2, 1) as cluster:
            cluster.prefill_by_affinity[0].ensure_errors = [AdapterIncompatible("rank 512 is over 64")]
            status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
            said = answer["error"]["code"], answer["error"]["message"]
            assert (status, *said) == (422, "adapter_incompatible", "rank 512 is over 64")
            assert not any(worker.engine.bodies for worker in cluster.workers)

    @pytest.mark.parametrize(
        ("error", "status", "code", "retry_after"),
        [
            (StoreUnavailable("no bucket"), 503, "adapter_store_unavailable", "1"),
            (StoreFull("no room"), 507, "adapter_store_full", "1"),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "adapter_unavailable", "7"),  # as the worker says
            (grpc.StatusCode.UNAVAILABLE, 502, "worker_lost", "1"),
        ],
    )
    async def test_a_workers_own_trouble_is_tried_elsewhere(
        self, error: Any, status: int, code: str, retry_after: str
    ) -> None:
        async with running_cluster(2, 1) as cluster:
            first, second = cluster.prefill_by_affinity
            first.ensure_errors = [error]
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert [len(first.engine.bodies), len(second.engine.bodies)] == [0, 1]
            for worker in cluster.prefill:
                worker.ensure_errors, worker.retry_after_s = [error], 6.2
            found, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
            assert (found, answer["error"]["code"], headers["retry-after"]) == (status, code, retry_after)
            assert "bucket" not in answer["error"]["message"]

    @pytest.mark.parametrize(
        ("keeps_deadlines", "errors", "status", "code"),
        [
            (True, [], 504, "deadline_exceeded"),
            (False, [], 504, "deadline_exceeded"),
            (True, [StoreUnavailable("s3://b")], 503, "adapter_store_unavailable"),  # what was in the way
        ],
    )
    async def test_slow_load_has_a_deadline(
        self, keeps_deadlines: bool, errors: list[Any], status: int, code: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_link, "ANSWER_MARGIN_S", 0.2)
        async with running_cluster(adapter_timeout_s=0.2) as cluster:
            (worker,) = cluster.prefill
            worker.ensure_delay_s, worker.keeps_deadlines, worker.ensure_errors = 60, keeps_deadlines, errors
            began = time.monotonic()
            found, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
            assert (found, answer["error"]["code"]) == (status, code)
            assert time.monotonic() - began < 30

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("shape", [(1, 1, 0), (0, 0, 1)], ids=["pair", "unified"])
    async def test_evicted_between_load_and_use(self, shape: tuple[int, int, int], stream: bool) -> None:
        """A unified engine that streams reports it by an event inside a 200."""
        message = (
            "The following requested LoRA adapters are not loaded: sha256:ab\nLoaded adapters: dict_keys(['s3cret'])."
        )
        error = {"object": "error", "message": message, "type": "424", "param": None, "code": 424}
        event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
        async with running_cluster(*shape) as cluster:
            (worker,) = cluster.prefill or cluster.unified
            fails = streams(event, b"data: [DONE]\n\n") if stream and cluster.unified else answers(424, error)

            async def ask(num_failures: int) -> tuple[int, str]:
                worker.engine.behaviours = [fails] * num_failures
                for decode in cluster.decode:
                    decode.engine.behaviours = [hangs] * num_failures
                body = {"model": MODEL, "prompt": "Hi", "adapter": "a0", "stream": stream}
                async with cluster.http.post(f"{cluster.url}/v1/completions", json=body) as response:
                    return response.status, await response.text()

            assert (await ask(1))[0] == 200
            assert worker.not_in_engine == [False, True]  # else a worker that thinks it has it does nothing
            status, text = await ask(3)
            assert (status, json.loads(text)["error"]["code"]) == (503, "adapter_not_resident")
            assert "s3cret" not in text

    async def test_wrong_references(self, cluster: ClusterStandIn) -> None:
        cases: list[tuple[dict[str, str], int, str]] = [
            ({"adapter": "broken"}, 422, "adapter_malformed"),
            ({"model": "a9"}, 404, "model_not_found"),
            ({"model": "base:a9"}, 404, "adapter_not_found"),
            ({"model": "base:a0", "adapter": "a1"}, 400, "conflicting_adapters"),
        ]
        for fields, status, code in cases:
            found, answer, _ = await cluster.post(prompt="Hi", **fields)
            assert (found, answer["error"]["code"]) == (status, code), fields
        _, answer, _ = await cluster.post(prompt="Hi", model="everywher")
        assert "'everywher' does not exist" in answer["error"]["message"]
        assert "`prelude adapters list` shows the names" in answer["error"]["message"]
        assert not cluster.prefill[0].engine.bodies
