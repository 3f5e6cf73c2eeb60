"""Workers that a running router finds by DNS: they join, leave, crash and come back while requests run."""

import asyncio
from random import Random

import pytest
from support.router_stand_ins import REVISION_ID, WorkerStandIn, until
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
        await until(lambda: decode.engine.num_running)
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
        await until(lambda: (fleet._links, fleet._watches) == ({}, {}))
        assert len(fleet.loads) == 0


async def test_a_worker_that_was_found_in_one_role_may_have_the_other() -> None:
    async with finding_router(role_changes="manual") as found:
        p0, p1, d0 = [
            await found.worker(name, role) for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"))
        ]
        found.name(p0, p1, role="prefill")
        found.name(d0, role="decode")
        for decode in ("d0", "p1"):
            p0.state.warm_pairs.add(decode_name=decode, decode_incarnation=f"{decode}-1")
        await found.has("p0", "p1", "d0")
        p1.role = "decode"
        await p1.restart_agent()
        fleet = found.cluster.fleet
        await until(lambda: [view.name for view in fleet.state.decodes] == ["d0", "p1"])
        assert fleet.link("p1").contact.endpoint.role == "prefill"  # its pool's, which gets it back first
        await d0.stop()
        await until(lambda: not fleet.state.workers["d0"].is_placeable)
        assert (await found.cluster.post(prompt="x"))[0] == 200
        assert len(p1.engine.bodies) == 1


@pytest.mark.slow
async def test_an_adapter_that_is_being_loaded_is_still_used_after_its_worker_has_left() -> None:
    async with finding_router() as found:
        worker = await found.worker("u0")
        worker.ensure_delay_s = 1.0
        found.name(worker)
        await found.has("u0")
        running = asyncio.create_task(found.cluster.post(prompt="x", adapter="a0"))
        await until(lambda: worker.ensured)
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
        await until(lambda: first.engine.num_running)
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
        await until(lambda: not found.cluster.fleet.state.is_settled)
        await worker.restart_agent()
        await found.has("u0")
        assert found.cluster.fleet.state.is_settled
        assert (await found.cluster.post(prompt="x", adapter="everywhere"))[0] == 200


@pytest.mark.slow
async def test_many_workers_come_and_go_and_no_request_fails() -> None:
    random = Random(7)
    async with finding_router(heartbeat_s=10) as found:
        workers = [await found.worker(f"u{number}") for number in range(24)]

        async def only(*present: WorkerStandIn) -> None:
            found.name(*present)
            await found.has(*(worker.name for worker in present), within_s=90)

        await only(*workers[:12])
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
        for _ in range(6):
            await only(*(present := random.sample(workers, 12)))
        is_over.set()
        await asyncio.gather(*clients)
        assert len(statuses) > 50
        assert set(statuses) == {200}
        await until(lambda: len(found.cluster.fleet._links) == len(present))
        assert await found.series() <= {worker.name for worker in present}
