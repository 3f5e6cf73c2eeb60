"""Requests with an adapter: loads that are slow, refused or tried elsewhere, and wrong references."""

from __future__ import annotations

import json
import time
from typing import Any

import grpc
import pytest
from support.router_stand_ins import (
    answers,
    hangs,
    running_cluster,
)

from adapters.errors import AdapterError, AdapterIncompatible
from adapters.store.errors import StoreFull, StoreUnavailable
from router.fleet import worker_link


class TestAdapters:
    async def test_refused_adapter_says_why(self) -> None:
        async with running_cluster(2, 1) as cluster:
            cluster.prefill_by_affinity[0].ensure_errors = [AdapterIncompatible("rank 512 is over 64")]
            status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
            assert (status, answer["error"]["message"]) == (422, "rank 512 is over 64")
            assert answer["error"]["code"] == "adapter_incompatible"
            assert not any(worker.engine.bodies for worker in cluster.workers)

    @pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
    async def test_busy_worker_is_left_for_another(self, code: grpc.StatusCode) -> None:
        async with running_cluster(2, 1) as cluster:
            first, second = cluster.prefill_by_affinity
            first.ensure_errors = [code]
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert [len(first.engine.bodies), len(second.engine.bodies)] == [0, 1]

    async def test_workers_that_are_all_busy_say_when_to_try_again(self) -> None:
        async with running_cluster(2, 1) as cluster:
            for worker in cluster.prefill:
                worker.ensure_errors, worker.retry_after_s = [grpc.StatusCode.RESOURCE_EXHAUSTED], 6.2
            status, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "adapter_unavailable", "7")
            assert [len(worker.ensured) for worker in cluster.prefill] == [1, 1]
            assert not any(worker.engine.bodies for worker in cluster.workers)
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200

    @pytest.mark.parametrize("error", [StoreUnavailable("no bucket"), StoreFull("no room")])
    async def test_a_workers_own_trouble_is_tried_elsewhere(self, error: AdapterError) -> None:
        async with running_cluster(2, 1) as cluster:
            first, second = cluster.prefill_by_affinity
            first.ensure_errors = [error]
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert [len(first.engine.bodies), len(second.engine.bodies)] == [0, 1]
            first.ensure_errors, second.ensure_errors = [error], [error]
            status, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
            assert (status, answer["error"]["code"]) == (error.http_status, error.code)
            assert headers["retry-after"] == "1"

    @pytest.mark.parametrize("keeps_deadlines", [True, False])
    async def test_slow_load_has_a_deadline(self, keeps_deadlines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_link, "ANSWER_MARGIN_S", 0.2)
        async with running_cluster(adapter_timeout_s=0.2) as cluster:
            (worker,) = cluster.prefill
            worker.ensure_delay_s, worker.keeps_deadlines = 60, keeps_deadlines
            began = time.monotonic()
            status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
            assert time.monotonic() - began < 30

    async def test_at_the_deadline_the_worker_says_what_was_in_the_way(self) -> None:
        async with running_cluster(adapter_timeout_s=0.2) as cluster:
            (worker,) = cluster.prefill
            worker.ensure_delay_s, worker.ensure_errors = 3, [StoreUnavailable("s3://bucket does not answer")]
            status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
            assert (status, answer["error"]["code"]) == (503, "adapter_store_unavailable")

    @pytest.mark.parametrize(
        "message",
        [
            "The following requested LoRA adapters are not loaded: sha256:ab\nLoaded adapters: dict_keys(['s3cret']).",
            "Got LoRA adapter that has never been loaded: sha256:ab\nAll loaded adapters: dict_keys(['s3cret']).",
        ],
    )
    async def test_evicted_between_load_and_use(self, message: str) -> None:
        error = {"object": "error", "message": message, "type": "424", "param": None, "code": 424}
        async with running_cluster() as cluster:
            prefill, decode = cluster.prefill[0], cluster.decode[0]
            prefill.engine.behaviours, decode.engine.behaviours = [answers(424, error)], [hangs]
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert prefill.not_in_engine == [False, True]  # else a worker that thinks it has it does nothing
            prefill.engine.behaviours, decode.engine.behaviours = [answers(424, error)] * 3, [hangs] * 3
            status, answer, _ = await cluster.post(prompt="Hi", adapter="a0")
            assert (status, answer["error"]["code"]) == (503, "adapter_not_resident")
            assert "s3cret" not in json.dumps(answer)

    @pytest.mark.parametrize(
        ("fields", "status", "code"),
        [
            ({"adapter": "a9"}, 404, "adapter_not_found"),
            ({"adapter": "broken"}, 422, "adapter_malformed"),
            ({"model": "broken"}, 422, "adapter_malformed"),
            ({"model": "a9"}, 404, "model_not_found"),
            ({"model": "base:a9"}, 404, "adapter_not_found"),
            ({"model": "base:a0", "adapter": "a1"}, 400, "conflicting_adapters"),
        ],
    )
    async def test_wrong_references(self, fields: dict[str, Any], status: int, code: str) -> None:
        async with running_cluster() as cluster:
            answer_status, answer, _ = await cluster.post(prompt="Hi", **fields)
            assert (answer_status, answer["error"]["code"]) == (status, code)
            assert not cluster.prefill[0].engine.bodies
