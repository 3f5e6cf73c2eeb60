"""Pushes over HTTP: a new revision is loaded where the old one was, then the alias moves."""

import asyncio
from pathlib import Path

import grpc
import pytest
from support.router_stand_ins import ClusterStandIn, after, eventually
from support.routers.management_calls import answered_by, ask, form, id_of, lora, managing, upload
from support.waiting import until

MANAGEMENT = True


class TestPush:
    async def test_it_is_loaded_where_the_old_one_was(self, tmp_path: Path) -> None:
        """And nowhere else; the next request finds it resident."""
        async with managing(3, 1) as cluster:
            await upload(cluster, lora(tmp_path, 1), name="acme/bot")
            first, second, _ = cluster.prefill
            for worker in (first, second):
                await worker.make_resident(id_of(tmp_path, 1))
            await _resident_on(cluster, "acme/bot", ["p0", "p1"])
            files = lora(tmp_path, 2)
            status, answer = await ask(cluster, "POST", "/v1/adapters/acme/bot/push", data=form(files))
            assert (status, answer["revision"], answer["number"]) == (200, id_of(tmp_path, 2), 2)
            assert (answer["alias"], set(answer["workers"])) == ("latest", {"p0", "p1"})
            assert answer["seconds"] >= max(answer["workers"].values())
            assert [worker.ensured for worker in cluster.prefill] == [[id_of(tmp_path, 2)]] * 2 + [[]]
            assert await answered_by(cluster, "acme/bot") == id_of(tmp_path, 2)
            assert await answered_by(cluster, "acme/bot@r1") == id_of(tmp_path, 1)
            assert not any(worker.prewarmed for worker in cluster.prefill)
            tenants = [tenant for worker in cluster.prefill for tenant in worker.tenants]
            assert sorted(tenants) == ["acme"] * 2 + ["default"] * 2  # the pushed adapter's, and who asked for it

    @pytest.mark.slow
    async def test_requests_in_flight_finish_on_the_old_one(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        await upload(cluster, lora(tmp_path, 1), name="bot")
        await answered_by(cluster, "bot")
        cluster.decode[0].engine.behaviours = [after(1.0)]
        running = asyncio.create_task(answered_by(cluster, "bot"))
        await eventually(lambda: cluster.admin("/debug/requests"), lambda page: len(page[1]["requests"]) == 1)
        status, _ = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 2)))
        assert status == 200
        assert not running.done()
        assert await answered_by(cluster, "bot") == id_of(tmp_path, 2)
        assert await running == id_of(tmp_path, 1)

    async def test_a_new_adapter_and_another_alias(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 1)))
        assert (status, answer["number"], answer["workers"]) == (200, 1, {})
        push = form(lora(tmp_path, 2), alias="train")
        status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
        assert (status, answer["number"], answer["workers"]) == (200, 2, {})  # there was no such alias
        assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
        assert await answered_by(cluster, "bot@train") == id_of(tmp_path, 2)
        push = form(lora(tmp_path, 3), alias="train")
        await _resident_on(cluster, "bot", ["p0"])
        status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
        assert (status, list(answer["workers"])) == (200, ["p0"])

    async def test_workers_that_fail(self, tmp_path: Path) -> None:
        async with managing(2, 1, adapter_timeout_s=1) as cluster:
            await upload(cluster, lora(tmp_path, 1), name="bot")
            first, second = cluster.prefill
            for worker in cluster.prefill:
                await worker.make_resident(id_of(tmp_path, 1))
            await _resident_on(cluster, "bot", ["p0", "p1"])
            first.ensure_errors = [grpc.StatusCode.UNAVAILABLE]
            status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 2)))
            assert status == 200  # one is enough: the other loads it when it is asked for it
            assert answer["workers"]["p0"]["error"]["code"] == "worker_lost"
            assert isinstance(answer["workers"]["p1"], float)
            await _resident_on(cluster, "bot", ["p1"])
            await first.make_resident(id_of(tmp_path, 2))
            await _resident_on(cluster, "bot", ["p0", "p1"])
            first.ensure_delay_s = second.ensure_delay_s = 3
            push = form(lora(tmp_path, 3))
            status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=push)
            assert (status, answer["error"]["code"]) == (502, "push_failed")
            assert "r3" in answer["error"]["message"]
            assert (await ask(cluster, "GET", "/v1/adapters/bot"))[1]["aliases"] == {"latest": 2}

    async def test_a_worker_that_drains_fails_no_push(self, tmp_path: Path) -> None:
        """It refuses to load, and may be drained for hours."""
        async with managing(2, 1) as cluster:
            await upload(cluster, lora(tmp_path, 1), name="bot")
            only = cluster.prefill[0]
            await only.make_resident(id_of(tmp_path, 1))
            await _resident_on(cluster, "bot", ["p0"])
            await only.change(draining=True)
            only.ensure_errors = [grpc.StatusCode.UNAVAILABLE]
            await until(lambda: cluster.view("p0").is_draining)
            status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(lora(tmp_path, 2)))
            assert (status, answer["number"], answer["workers"]) == (200, 2, {})
            assert await answered_by(cluster, "bot") == id_of(tmp_path, 2)


async def _resident_on(cluster: ClusterStandIn, name: str, workers: list[str]) -> None:
    def is_there(answer: tuple[int, dict]) -> bool:
        shown = answer[1]
        (latest,) = [each for each in shown["revisions"] if each["number"] == shown["aliases"]["latest"]]
        return latest["workers"]["host"] == workers

    await eventually(lambda: ask(cluster, "GET", f"/v1/adapters/{name}"), is_there)
