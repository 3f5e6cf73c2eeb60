"""Workers that a running router finds by DNS: they join, leave, crash and come back while requests run."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from support.router_stand_ins import REVISION_ID, eventually, until
from support.routers.finding_router import finding_router


@pytest.mark.slow
async def test_a_pair_joins_and_a_stream_outlives_its_departure() -> None:
    async with finding_router() as found:
        cluster = found.cluster
        assert (await cluster.post(prompt="x"))[0] == 503
        prefill, decode = await found.worker("p0", "prefill"), await found.worker("d0", "decode")
        prefill.state.warm_pairs.add(decode_name="d0", decode_incarnation="d0-1")
        found.name(prefill, role="prefill")
        found.name(decode, role="decode")
        await found.has("p0", "d0")
        assert (await cluster.post(prompt="x", adapter="a0"))[0] == 200
        assert prefill.ensured == [REVISION_ID]
        assert await found.series() == {"p0", "d0"}

        decode.engine.event_gap_s = 0.4
        running = asyncio.create_task(cluster.stream(prompt="x " * 500))
        await eventually(lambda: asyncio.sleep(0, decode.engine.num_running), bool)
        found.name(role="prefill")
        found.name(role="decode")
        await found.has()
        assert await found.series() == set()
        assert (await cluster.post(prompt="x"))[0] == 503
        assert not running.done()
        assert (await running)[-1] == b"[DONE]"
        assert decode.engine.aborted == prefill.engine.aborted == []
        # Nothing of them is left.
        fleet = cluster.fleet
        await eventually(lambda: asyncio.sleep(0, (fleet._links, fleet._watches)), lambda left: left == ({}, {}))
        assert len(fleet.loads) == 0


@pytest.mark.slow
async def test_an_adapter_that_is_being_loaded_is_still_used_after_its_worker_has_left() -> None:
    async with finding_router() as found:
        worker = await found.worker("u0")
        worker.ensure_delay_s = 1.0
        found.name(worker)
        await found.has("u0")
        running = asyncio.create_task(found.cluster.post(prompt="x", adapter="a0"))
        await eventually(lambda: asyncio.sleep(0, worker.ensured), bool)
        found.name()
        await found.has()
        assert (await running)[0] == 200


async def test_an_engine_that_dies_after_its_worker_has_left_is_noticed() -> None:
    async with finding_router() as found:
        first, second = await found.worker("u0"), await found.worker("u1")
        first.engine.event_gap_s = 100
        found.name(first)
        await found.has("u0")
        running = asyncio.create_task(found.cluster.stream(prompt="x"))
        await eventually(lambda: asyncio.sleep(0, first.engine.num_running), bool)
        found.name(second)
        await found.has("u1")
        await first.change(engine_state=2, incarnation="u0-2")  # restarted
        assert (await running)[-1] == b"[DONE]"  # of the other one
        assert len(second.engine.bodies) == 1


@pytest.mark.slow
async def test_a_worker_that_crashed_is_forgotten_and_comes_back_elsewhere() -> None:
    async with finding_router(forget_after_s=1.0) as found:
        first, other = await found.worker("u0"), await found.worker("u1")
        found.name(first, other)
        await found.has("u0", "u1")
        for number in range(4):
            await found.cluster.stream(prompt=f"{number} " * 400)  # shows when its prompt was read
        found.cluster.fleet.loads["u0"].add_prompt(7)
        await first.stop()
        assert (await found.cluster.post(prompt="x"))[0] == 200
        await found.has("u1")  # forgotten, though DNS still names it
        assert await found.series() <= {"u1"}

        back = await found.worker("u0")
        back.state.incarnation = "u0-2"
        found.name(first, other, back)  # the old record is still there
        await found.has("u0", "u1")
        assert found.cluster.view("u0").engine_url == back.engine.url
        assert found.cluster.fleet.loads["u0"].prompt_tokens == 0  # its loads are new, too


@pytest.mark.slow
async def test_a_restart_at_another_address_needs_no_forgetting() -> None:
    async with finding_router() as found:
        first, back = await found.worker("u0"), await found.worker("u0")
        back.state.incarnation, back.agent_id = "u0-2", "another agent"
        found.name(first)
        await found.has("u0")
        await first.stop()
        found.name(first, back)
        await until(lambda: found.cluster.view("u0").incarnation == "u0-2")
        assert (await found.cluster.post(prompt="x"))[0] == 200
        assert len(back.engine.bodies) == 1


async def test_hostile_workers_get_nothing() -> None:
    async with finding_router() as found:
        good = await found.worker("u0")
        hostile = [await found.worker(name) for name in ("../u1", "u2", "u3")]
        hostile[1].described = {"model": "another"}
        hostile[2].role = "decode"
        duplicate = await found.worker("u0")
        duplicate.agent_id = "another"
        found.name(duplicate, *hostile, good)
        await found.has("u0")
        await until(lambda: found.cluster.view("u0").engine_url == good.engine.url)
        for _ in range(5):
            assert (await found.cluster.post(prompt="x"))[0] == 200
        assert len(good.engine.bodies) == 5


async def test_a_worker_that_reports_too_much_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.worker_link._MAX_REVISIONS", 10)
    async with finding_router() as found:
        good, hostile = await found.worker("u0"), await found.worker("u1")
        hostile.resident = {f"sha256:{number:064x}" for number in range(11)}
        found.name(good, hostile)
        await found.has("u0", unready=["u1"])
        view = found.cluster.view("u1")
        assert view.why_not_placeable in ("it reports more than 10 adapters", "not reached yet")


async def test_what_nobody_can_serve_now_may_still_come() -> None:
    """An adapter for all positions, and a revision that is in workers' memory only: not refused for good."""
    async with finding_router() as found:
        status, answer, _ = await found.cluster.post(prompt="x", adapter="everywhere")
        assert (status, answer["error"]["code"]) == (503, "no_worker_available")
        assert found.cluster.fleet.state.is_settled
        worker = await found.worker("u0")
        await worker.stop_agent()
        found.name(worker)  # it may be the one that has such a revision
        await eventually(lambda: asyncio.sleep(0, found.cluster.fleet.state.is_settled), lambda settled: not settled)
        await worker.restart_agent()
        await found.has("u0")
        assert found.cluster.fleet.state.is_settled
        assert (await found.cluster.post(prompt="x", adapter="everywhere"))[0] == 200


@pytest.mark.slow
async def test_64_workers_come_and_go_and_no_request_fails() -> None:
    seed = 7
    random = Random(seed)
    print(f"seed {seed}")
    async with finding_router(heartbeat_s=10) as found:
        workers = [await found.worker(f"u{number}") for number in range(64)]
        for worker in workers:
            worker.engine.event_gap_s = 0.01
        present = set(range(32))

        found.name(*(workers[number] for number in sorted(present)))
        await found.has(*(f"u{number}" for number in present), within_s=90)
        statuses: list[int] = []
        is_over = asyncio.Event()

        async def client(number: int) -> None:
            while not is_over.is_set():
                adapter = {"adapter": "a0"} if number % 2 else {}
                if number % 3:
                    status, _, _ = await found.cluster.post(prompt=f"{number}", **adapter)
                else:
                    events = await found.cluster.stream(prompt=f"{number}", **adapter)
                    status = 200 if events[-1] == b"[DONE]" and b'"error"' not in b"".join(events) else 0
                statuses.append(status)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        seen: set[int] = set()
        for _ in range(8):
            present = set(random.sample(range(64), 32))
            seen |= present
            found.name(*(workers[number] for number in sorted(present)))
            await found.has(*(f"u{number}" for number in present), within_s=90)
        is_over.set()
        await asyncio.gather(*clients)
        assert len(seen) > 60
        assert len(statuses) > 50
        assert set(statuses) == {200}
        fleet = found.cluster.fleet
        await eventually(lambda: asyncio.sleep(0, len(fleet._links)), lambda count: count == 32)
        assert set(fleet.loads) <= {f"u{number}" for number in present}
        assert await found.series() <= {f"u{number}" for number in present}
