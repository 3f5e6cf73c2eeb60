"""Memory-only revisions: pushed into workers' memory, served from there, answered with 410 once they are lost."""

import asyncio
import glob
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.held_calls import failing
from support.router_stand_ins import BASE, EVERYWHERE_ID, TEMPLATE, ClusterStandIn, until
from support.routers.management_calls import (
    answered_by,
    ask,
    files_of,
    form,
    gone,
    id_of,
    id_of_pushed,
    in_store,
    lora,
    managing,
    push,
    upload,
)

from adapters.errors import CatalogUnavailable
from adapters.packed import read_packed
from router.fleet import worker_link
from router.generation import sequence_run

MANAGEMENT = True


class TestPush:
    async def test_a_worker_of_another_host_gets_the_content_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        async def is_of_this_host(host: str) -> bool:
            asked.append(host)
            return False

        monkeypatch.setattr(worker_link, "is_of_this_host", is_of_this_host)
        async with managing(1, 1) as cluster:
            [worker] = cluster.prefill
            assert (await push(cluster, tmp_path, 1))[0] == 200
            assert asked == ["127.0.0.1"]
            assert (worker.num_puts, worker.num_chunks) == (1, 1)

    async def test_it_is_on_every_worker_that_can_hold_it_and_nowhere_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_link, "_CHUNK_BYTES", 1000)  # else it would be one
        async with managing(2, 1, 1) as cluster:
            far, *near = cluster.prefill + cluster.unified
            far.sees_files = False
            await upload(cluster, lora(tmp_path, 1), name="bot")
            before = in_store(cluster)
            status, answer = await push(cluster, tmp_path, 2)
            new = id_of(tmp_path, 2)
            assert (status, answer["revision"], answer["number"], answer["alias"]) == (200, new, 2, "latest")
            assert answer["stored"] is False
            assert set(answer["workers"]) == {"p0", "p1", "u0"}
            assert all(isinstance(seconds, float) for seconds in answer["workers"].values())
            assert far.num_chunks > 5
            assert {worker.num_chunks for worker in near} == {0}, "the file is at hand, and was sent as well"
            for worker in (far, *near):
                assert worker.kept == {new}
                packed = tmp_path / f"of-{worker.name}"
                packed.write_bytes(worker.memory_only[new])
                read_packed(packed).check_fits(BASE)
                assert read_packed(packed).metadata.revision_id == new
            assert not cluster.decode[0].memory_only
            assert in_store(cluster) == before
            assert await answered_by(cluster, "bot") == new
            assert await answered_by(cluster, "bot@r1") == id_of(tmp_path, 1)
            shown = (await ask(cluster, "GET", "/v1/adapters/bot"))[1]
            assert (shown["latest"]["stored"], shown["aliases"]) == (False, {"latest": 2})
            assert [each["stored"] for each in shown["revisions"]] == [False, True]
            assert (await ask(cluster, "GET", "/v1/adapters"))[1]["data"][1]["latest"]["stored"] is False

    async def test_nothing_of_it_comes_to_a_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither while it is being sent nor while workers take it."""
        shared_memory, disk = tmp_path / "shm", tmp_path / "tmp"  # others' folders are not among them
        for folder in (shared_memory, disk):
            folder.mkdir()
        monkeypatch.setattr("adapters.files.work_folder.SHARED_MEMORY", shared_memory)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        async with managing() as cluster:
            (worker,) = cluster.prefill
            worker.put_delay_s = 0.5
            pushing = asyncio.create_task(push(cluster, tmp_path, 1))
            new: set[str] = set()
            while not pushing.done():
                new |= set(glob.glob(f"{shared_memory}/prelude-work-*/*"))
                assert not list(disk.glob("prelude-work-*"))
                await asyncio.sleep(0.005)
            assert (await pushing)[0] == 200
            assert any(name.endswith(".safetensors") for name in new)
            await until(lambda: not list(shared_memory.iterdir()))

    async def test_the_one_before_is_given_up(self, tmp_path: Path) -> None:
        async with managing(2, 1) as cluster:
            ids = [id_of_pushed(await push(cluster, tmp_path, seed)) for seed in (1, 2)]
            for worker in cluster.prefill:
                assert set(worker.memory_only) == set(ids)  # it leaves when there is no room for it
                assert worker.kept == {ids[1]}
            # Where another alias or another adapter stands for it, it stays.
            await ask(cluster, "PUT", "/v1/adapters/bot/aliases/prod", json={"revision": "r2"})
            ids.append(id_of_pushed(await push(cluster, tmp_path, 3)))
            assert cluster.prefill[0].kept == set(ids[1:])
            await push(cluster, tmp_path, 3, name="acme/other")
            ids.append(id_of_pushed(await push(cluster, tmp_path, 4, alias="prod")))
            assert cluster.prefill[0].kept == {ids[2], ids[3]}
            ids.append(id_of_pushed(await push(cluster, tmp_path, 5)))
            assert cluster.prefill[0].kept == {ids[2], ids[3], ids[4]}
            await ask(cluster, "DELETE", "/v1/adapters/acme/other")
            assert cluster.prefill[0].kept == {ids[3], ids[4]}
            await ask(cluster, "POST", "/v1/adapters/acme/other/restore")
            assert cluster.prefill[0].kept == {ids[2], ids[3], ids[4]}
            # An alias that is moved back, and one that an ordinary push moves on.
            await ask(cluster, "POST", "/v1/adapters/bot/rollback")
            assert cluster.prefill[0].kept == {ids[2], ids[3]}
            data = form(lora(tmp_path, 6), alias="prod")
            await ask(cluster, "POST", "/v1/adapters/bot/push", data=data)
            assert cluster.prefill[1].kept == {ids[2]}

    async def test_what_is_stored_later_need_not_be_kept(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        first = id_of_pushed(await push(cluster, tmp_path, 1))
        assert first not in {f"sha256:{name}" for name in in_store(cluster)}
        status, answer = await upload(cluster, lora(tmp_path, 1), name="bot")
        assert (status, answer["number"], answer["stored"]) == (201, 1, True)
        assert first in {f"sha256:{name}" for name in in_store(cluster)}
        assert cluster.prefill[0].kept == set()
        assert await answered_by(cluster, "bot") == first
        status, answer = await push(cluster, tmp_path, 1)  # what is stored stays so
        assert (status, answer["stored"], cluster.prefill[0].kept) == (200, True, set())

    async def test_one_worker_is_enough(self, tmp_path: Path) -> None:
        async with managing(3, 1) as cluster:
            cluster.prefill[0].put_errors = [grpc.StatusCode.RESOURCE_EXHAUSTED]
            status, answer = await push(cluster, tmp_path, 1)
            assert status == 200
            assert answer["workers"]["p0"]["error"]["code"] == "adapter_unavailable"
            assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
            (served,) = [worker for worker in cluster.prefill if worker.ensured]
            served.ensure_errors = [grpc.StatusCode.UNAVAILABLE]
            assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
            assert [bool(worker.ensured) for worker in cluster.prefill] == [False, True, True]  # who has it

    async def test_where_no_worker_takes_it_nothing_has_changed(self, tmp_path: Path) -> None:
        async with managing(2, 1, adapter_timeout_s=1) as cluster:
            await upload(cluster, lora(tmp_path, 1), name="bot")
            cluster.prefill[0].put_errors = [grpc.StatusCode.UNAVAILABLE]
            cluster.prefill[1].put_delay_s = 3
            status, answer = await push(cluster, tmp_path, 2)
            assert (status, answer["error"]["code"]) == (502, "push_failed")
            shown = (await ask(cluster, "GET", "/v1/adapters/bot"))[1]
            assert (shown["num_revisions"], shown["aliases"]) == (1, {"latest": 1})
            cluster.prefill[0].put_errors = [grpc.StatusCode.UNIMPLEMENTED]  # an agent of an earlier release
            assert (await push(cluster, tmp_path, 3, name="new"))[0] == 502
            assert (await ask(cluster, "GET", "/v1/adapters/new"))[0] == 404

    async def test_a_catalog_that_refuses_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: ClusterStandIn
    ) -> None:
        """Workers give up what they were sent just now, unless it may be in the catalog all the same."""
        (worker,) = cluster.prefill
        await push(cluster, tmp_path, 1, name="deleted")
        await ask(cluster, "DELETE", "/v1/adapters/deleted")
        status, answer = await push(cluster, tmp_path, 2, name="deleted")
        assert (status, answer["error"]["code"]) == (409, "catalog_conflict")
        assert (set(worker.memory_only), worker.kept) == ({id_of(tmp_path, 1), id_of(tmp_path, 2)}, set())
        kept = id_of_pushed(await push(cluster, tmp_path, 3))
        await push(cluster, tmp_path, 3, name="deleted")
        assert worker.kept == {kept}  # which another adapter has

        catalog = type(cluster.adapters._library.catalog)
        failing(monkeypatch, catalog, "add_revision", CatalogUnavailable("broke during a commit"))
        assert (await push(cluster, tmp_path, 4))[0] == 503
        assert worker.kept == {kept, id_of(tmp_path, 4)}
        assert await answered_by(cluster, "bot") == kept

    async def test_one_that_acts_everywhere_goes_to_unified_workers(self) -> None:
        async def push_everywhere(cluster: ClusterStandIn) -> tuple[int, Any]:
            data = form(files_of(TEMPLATE / "everywhere"), memory_only="true")
            return await ask(cluster, "POST", "/v1/adapters/all/push", data=data)

        async with managing(1, 1, 1, directories={}) as cluster:
            status, answer = await push_everywhere(cluster)
            assert (status, list(answer["workers"])) == (200, ["u0"])
            assert await answered_by(cluster, "all") == EVERYWHERE_ID
        async with managing(1, 1, directories={}) as cluster:
            status, answer = await push_everywhere(cluster)
            assert (status, answer["error"]["code"]) == (503, "no_worker_available")

    async def test_the_field(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        for value in ("yes", "", "True", "1"):
            data = form(lora(tmp_path, 1), memory_only=value)
            status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=data)
            assert (status, answer["error"]["param"]) == (400, "memory_only")
        late = form(lora(tmp_path, 1))
        late.add_field("memory_only", "true")
        status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=late)
        assert (status, answer["error"]["param"]) == (400, "memory_only")
        assert "must come before the files" in answer["error"]["message"]
        status, answer = await upload(cluster, lora(tmp_path, 1), name="bot", memory_only="true")
        assert (status, answer["error"]["param"]) == (400, "memory_only")  # of pushes only
        assert not cluster.prefill[0].memory_only
        data = form(lora(tmp_path, 1), memory_only="false")
        status, answer = await ask(cluster, "POST", "/v1/adapters/bot/push", data=data)
        assert (status, answer["stored"], cluster.prefill[0].memory_only) == (200, True, {})
        status, answer = await push(cluster, tmp_path, 2, name="base")
        assert (status, answer["error"]["param"]) == (400, "name")


class TestRequests:
    async def test_one_that_nobody_has_any_more(self, tmp_path: Path) -> None:
        async with managing(2, 1) as cluster:
            await upload(cluster, lora(tmp_path, 1), name="bot")
            new = id_of_pushed(await push(cluster, tmp_path, 2))
            for worker in cluster.prefill:
                await worker.evict_memory_only(new)
            await until(lambda: not cluster.fleet.workers_with_in_memory_only())
            error = await gone(cluster, "bot")
            assert (error["code"], error["param"]) == ("adapter_revision_gone", "adapter")
            for words in ("bot@r2", new, "memory only", "push it again", "`prelude adapters rollback bot@ALIAS`"):
                assert words in error["message"]
            assert all(new not in worker.ensured for worker in cluster.prefill)
            assert await answered_by(cluster, "bot@r1") == id_of(tmp_path, 1)
            await ask(cluster, "POST", "/v1/adapters/bot/rollback")
            assert await answered_by(cluster, "bot") == id_of(tmp_path, 1)
            await ask(cluster, "PUT", "/v1/adapters/bot/aliases/latest", json={"revision": "r2"})
            assert (await push(cluster, tmp_path, 2))[1]["number"] == 2
            assert await answered_by(cluster, "bot") == new

    @pytest.mark.slow
    async def test_a_worker_that_has_just_lost_it(self, tmp_path: Path) -> None:
        """Another one that has it is asked; where none is left, the client may try again, and hears the truth then."""
        async with managing(2, 1) as cluster:
            first, second = cluster.prefill
            new = id_of_pushed(await push(cluster, tmp_path, 1))
            for worker in cluster.prefill:
                worker.has_no_store = True
            first.resident.clear()
            first.memory_only.clear()  # which it has not reported yet
            assert await answered_by(cluster, "bot") == new
            assert new in first.ensured
            second.resident.clear()
            second.memory_only.clear()
            assert (await gone(cluster, "bot", 503))["code"] == "no_worker_available"
            for worker in cluster.prefill:
                await worker.send_delta(not_in_memory_only=[new], evicted=[new])
            await until(lambda: not cluster.fleet.workers_with_in_memory_only())
            assert (await gone(cluster, "bot"))["code"] == "adapter_revision_gone"

    async def test_a_push_waits_for_the_workers_own_word(self, tmp_path: Path, cluster: ClusterStandIn) -> None:
        (worker,) = cluster.prefill
        worker.reports_residency = False
        pushing = asyncio.create_task(push(cluster, tmp_path, 1))
        await until(lambda: bool(worker.memory_only))
        await asyncio.sleep(0.3)
        assert not pushing.done()
        assert await answered_by(cluster, "bot") == 404  # the alias comes after it
        new = id_of(tmp_path, 1)
        await worker.send_delta(in_memory_only=[new], resident=[new])
        assert (await pushing)[0] == 200
        assert await answered_by(cluster, "bot") == new

    @pytest.mark.slow
    async def test_another_router_hears_of_the_alias_before_the_worker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sequence_run, "_RESIDENCY_LAG_S", 3.0)
        async with managing(folder=tmp_path, quotas={}, max_running_requests=1) as cluster:
            (worker,) = cluster.prefill
            worker.reports_residency = False
            # As if it was another one's push.
            monkeypatch.setattr("router.management.adapters_import._RESIDENCY_TIMEOUT_S", 0.05)
            new = id_of_pushed(await push(cluster, tmp_path, 1))
            asking = asyncio.create_task(answered_by(cluster, "bot"))
            await asyncio.sleep(0.3)
            assert not asking.done()
            assert (await cluster.post(prompt="Hi"))[0] == 200  # it takes no room meanwhile
            assert not asking.done()
            await worker.send_delta(in_memory_only=[new], resident=[new])
            assert await asking == new
