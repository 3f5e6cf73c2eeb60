"""Which memory-only revisions workers are told to keep and to give up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import ClusterStandIn, until
from support.routers.management_calls import answered_by, id_of_pushed, managing, push

from router.revisions import memory_only
from router.revisions.memory_only import MemoryOnlyRevisions

MANAGEMENT = True


@pytest.mark.slow
async def test_what_others_have_changed_is_seen_to_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's revision is left alone while somebody can be pushing it, and given up after that."""
    monkeypatch.setattr(memory_only, "_INTERVAL_S", 0.05)
    async with managing() as cluster:
        (worker,) = cluster.prefill
        new, nobody_s = id_of_pushed(await push(cluster, tmp_path, 1)), f"sha256:{7:064x}"
        worker.memory_only[nobody_s] = b""  # of a router that has ended
        worker.kept.add(nobody_s)
        await worker.send_delta(in_memory_only=[nobody_s], kept=[nobody_s])
        catalog = cluster.adapters._catalog
        await asyncio.to_thread(catalog.delete, "default", "bot")  # as the command line does
        await until(lambda: worker.kept == {nobody_s})
        await asyncio.to_thread(catalog.restore, "default", "bot")
        await until(lambda: worker.kept == {new, nobody_s})
        monkeypatch.setattr(memory_only, "_ABANDONED_S", 0.2)
        await until(lambda: worker.kept == {new})


@pytest.mark.slow
async def test_a_push_that_is_under_way_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_only, "_INTERVAL_S", 0.02)
    async with managing(2, 1) as cluster:
        first, second = cluster.prefill
        old = id_of_pushed(await push(cluster, tmp_path, 1))
        await push(cluster, tmp_path, 2)
        await until(lambda: old not in first.kept)
        second.put_delay_s = 0.5
        pushing = asyncio.create_task(push(cluster, tmp_path, 1))  # the old one again: the catalog knows it
        while old not in first.kept:  # noqa: ASYNC110
            await asyncio.sleep(0)
        first.unpinned.clear()
        assert (await pushing)[1]["number"] == 1
        assert old not in first.unpinned
        assert old in first.kept
        assert await answered_by(cluster, "bot") == old


async def test_workers_hear_of_what_has_changed_only(tmp_path: Path, cluster: ClusterStandIn) -> None:
    """With 400 live revisions, a push that renewed every pin took 160 ms instead of 25."""
    (worker,) = cluster.prefill
    ids = [id_of_pushed(await push(cluster, tmp_path, seed, alias=f"a{seed}")) for seed in range(3)]
    worker.kept.discard(ids[2])  # another router released it by mistake
    await worker.send_delta(not_kept=[ids[2]])
    await until(lambda: not cluster.fleet.workers_with_in_memory_only()[ids[2]]["p0"])
    await push(cluster, tmp_path, 3, alias="a0")
    assert (worker.pinned, worker.unpinned) == ([], ids[:1])
    for _ in range(2):
        await MemoryOnlyRevisions(cluster.fleet, cluster.adapters).reconcile()
        assert (worker.pinned, worker.unpinned) == (ids[2:], ids[:1])


async def test_a_push_begins_when_nothing_is_being_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: ClusterStandIn
) -> None:
    """Otherwise a worker might unpin a revision that it has just received again."""
    (worker,) = cluster.prefill
    old = id_of_pushed(await push(cluster, tmp_path, 1))
    catalog = cluster.adapters._catalog
    await asyncio.to_thread(catalog.delete, "default", "bot")
    may_answer, with_catalog = asyncio.Event(), cluster.adapters.with_catalog

    async def later(work: Any, *arguments: Any) -> Any:
        answer = await with_catalog(work, *arguments)
        await may_answer.wait()
        return answer

    monkeypatch.setattr(cluster.adapters, "with_catalog", later)
    revisions = MemoryOnlyRevisions(cluster.fleet, cluster.adapters)
    reconciling = asyncio.create_task(revisions.reconcile())
    await asyncio.sleep(0.1)
    pushing = revisions.pushing(old)
    entering = asyncio.create_task(pushing.__aenter__())
    await asyncio.sleep(0.1)
    assert not entering.done()
    may_answer.set()
    await asyncio.gather(reconciling, entering)
    assert worker.unpinned == [old]
    await pushing.__aexit__(None, None, None)


@pytest.mark.slow
async def test_a_catalog_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is served, nothing is given up, and a push is refused before any worker is given anything."""
    monkeypatch.setattr(memory_only, "_INTERVAL_S", 0.05)
    async with managing(folder=tmp_path / "cluster") as cluster:
        (worker,) = cluster.prefill
        new = id_of_pushed(await push(cluster, tmp_path, 1))
        assert await answered_by(cluster, "bot") == new
        catalog = cluster.adapters._catalog
        (tmp_path / "away").symlink_to(tmp_path)
        # At one moment: between two the router's threads would open the old file again, or make a new one.
        (tmp_path / "away").replace(tmp_path / "cluster" / "catalog.db")
        catalog.close()
        status, answer = await push(cluster, tmp_path, 2)
        assert (status, answer["error"]["code"]) == (503, "catalog_unavailable")
        await asyncio.sleep(0.3)
        assert (set(worker.memory_only), worker.kept) == ({new}, {new})
        assert await answered_by(cluster, "bot") == new
