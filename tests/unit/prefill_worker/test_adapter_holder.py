"""An agent that holds adapters, over its real gRPC service; only its engine is a stand-in."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest
from support.adapters.held_adapters import StoredAdapters, until
from support.adapters.random_adapters import write_random_reft
from support.clusters.running_agent import RunningAgent, configured, refused, running_agent
from support.engines.engine_stand_in import Engine

from adapters.packed import read_packed
from cluster.agent import worker_agent
from cluster.control import control_pb2 as pb
from cluster.errors import ERROR_CODE_KEY, HTTP_STATUS_KEY, RETRY_AFTER_KEY, StartError
from engine.hooks import report
from engine.supervisor import EngineStatus
from prefill_worker import unified_agent
from prefill_worker.unified_agent import UnifiedAgent


async def test_adapters_over_grpc(stored: StoredAdapters, running: RunningAgent):
    a, b = stored.ids[:2]
    cold = await running.ensure(a)
    assert cold.load_s > 0
    assert (await running.ensure(a)).load_s == 0
    await running.ensure(b)
    # The call starts at once; its snapshot must not be older than what it is compared with.
    await until(lambda: running.agent.hub.on_disk == {a, b})
    states = running.control.WatchState(pb.WatchStateRequest())
    first = (await states.read()).residency
    assert (first.snapshot, list(first.resident), list(first.on_disk)) == (True, sorted([a, b]), sorted([a, b]))

    await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a, pinned=True))
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "is pinned") as metadata:
        await running.control.EvictAdapter(pb.EvictAdapterRequest(revision_id=a))
    assert metadata[ERROR_CODE_KEY] == "adapter_in_use"
    await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a, pinned=False))
    await asyncio.sleep(0.06)
    answer = await running.control.EvictAdapter(pb.EvictAdapterRequest(revision_id=a, from_disk=True))
    assert answer.evicted
    assert not (await running.control.EvictAdapter(pb.EvictAdapterRequest(revision_id=a))).evicted
    changes = [(await states.read()).residency for _ in range(4)]
    assert [(*each.kept, *each.not_kept, *each.evicted, *each.off_disk) for each in changes] == [(a,)] * 4
    text = generate_latest(running.agent.metrics.registry).decode()
    assert 'prelude_worker_adapter_loads_total{result="ok",role="unified",source="store",worker="w"}' in text


async def test_errors_carry_a_code_and_retry_after(stored: StoredAdapters, tmp_path: Path):
    a, b, c, d = stored.ids[:4]
    async with running_agent(stored, tmp_path, parallel_loads=1, queued_loads=1) as running:
        running.engine.may_answer.clear()
        loading = [asyncio.create_task(running.ensure(each)) for each in (a, b)]
        await until(lambda: len(running.agent._residency._queue.keys) == 2)  # type: ignore[union-attr]
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "2 adapters are being loaded") as metadata:
            await running.ensure(c)
        assert float(metadata[RETRY_AFTER_KEY]) > 0
        assert ERROR_CODE_KEY not in metadata
        async with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "not resident within 0.1 s"):
            await running.ensure(a, deadline_s=0.1)
        running.engine.may_answer.set()
        await asyncio.gather(*loading)

        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "has no sha256:0000") as metadata:
            await running.ensure("sha256:" + "0" * 64)
        assert (metadata[ERROR_CODE_KEY], metadata[HTTP_STATUS_KEY]) == ("adapter_revision_not_stored", "404")
        stored.move_away()
        async with refused(grpc.StatusCode.UNAVAILABLE, "does not exist") as metadata:
            await running.ensure(c, deadline_s=0.3)
        assert (metadata[ERROR_CODE_KEY], metadata[HTTP_STATUS_KEY]) == ("adapter_store_unavailable", "503")
        assert (await running.ensure(a)).load_s == 0
        stored.move_back()
        await running.ensure(c)

        running.engine.refused[d] = "no"
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "the engine does not take") as metadata:
            await running.ensure(d)
        assert (metadata[ERROR_CODE_KEY], metadata[HTTP_STATUS_KEY]) == ("adapter_refused_by_engine", "422")
        running.engine.held.clear()
        assert (await running.ensure(a)).load_s == 0
        request = pb.EnsureAdapterRequest(revision_id=a, not_in_engine=True)
        assert (await running.control.EnsureAdapter(request)).load_s > 0
        assert set(running.engine.held) == {a}
        await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a, pinned=True))
        running.agent.hub.update(draining=True)
        async with refused(grpc.StatusCode.UNAVAILABLE, "is draining"):
            await running.ensure(a)
        async with refused(grpc.StatusCode.UNAVAILABLE, "is draining"):
            await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a, pinned=True))
        await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a, pinned=False))
        assert not running.agent._residency._host.pins  # type: ignore[union-attr]


async def test_a_load_ends_when_its_last_client_leaves(stored: StoredAdapters, running: RunningAgent):
    queue = running.agent._residency._queue  # type: ignore[union-attr]
    running.engine.may_answer.clear()
    calls = [asyncio.create_task(running.ensure(stored.ids[0])) for _ in range(3)]
    await until(lambda: queue.num_waiters == 3)
    for number, call in enumerate(calls):
        assert queue.keys == [stored.ids[0]]
        call.cancel()
        await until(lambda left=2 - number: queue.num_waiters == left)
    await until(lambda: queue.keys == [])
    assert running.agent.hub.resident == set()


async def test_engines_come_and_go(stored: StoredAdapters, running: RunningAgent):
    a, b = stored.ids[:2]
    await running.ensure(a)
    await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a, pinned=True))
    await running.engine.stop()
    running.engine_is(EngineStatus.DOWN)
    assert running.agent.hub.resident == set()
    async with refused(grpc.StatusCode.UNAVAILABLE, "the engine of w is not up"):
        await running.ensure(b)
    await running.engine.start()
    running.engine_is(EngineStatus.UP, "two")
    await until(lambda: running.agent.hub.resident == {a})
    assert set(running.engine.held) == {a}


def parts_of(stored: StoredAdapters, revision_id: str) -> list[pb.PutAdapterRequest]:
    """The messages of a push of a revision that the store does not have."""
    stored.object_of(revision_id).unlink(missing_ok=True)
    content = stored.packed[revision_id].read_bytes()
    begin = pb.PutAdapterBegin(
        revision_id=revision_id,
        content_bytes=len(content),
        content_sha256=hashlib.sha256(content).hexdigest(),
        deadline_s=5,
    )
    chunks = (content[start : start + 1000] for start in range(0, len(content), 1000))
    return [pb.PutAdapterRequest(begin=begin), *(pb.PutAdapterRequest(chunk=chunk) for chunk in chunks)]


async def test_a_pushed_adapter(stored: StoredAdapters, running: RunningAgent):
    a = stored.ids[0]
    states = running.control.WatchState(pb.WatchStateRequest())
    await states.read()
    for was_pinned in (False, True):
        answer = await running.control.PutAdapter(iter(parts_of(stored, a)), timeout=120)
        assert answer.was_pinned is was_pinned
    deltas = [(await states.read()).residency for _ in range(3)]
    assert [(*each.in_memory_only, *each.resident, *each.kept) for each in deltas] == [(a,)] * 3
    await running.control.PinAdapter(pb.PinAdapterRequest(revision_id=a))
    await asyncio.sleep(0.06)
    assert (await running.control.EvictAdapter(pb.EvictAdapterRequest(revision_id=a))).evicted
    deltas = [(await states.read()).residency for _ in range(3)]
    assert [(*each.not_kept, *each.evicted, *each.not_in_memory_only) for each in deltas] == [(a,)] * 3


async def test_an_invalid_push_leaves_nothing(stored: StoredAdapters, running: RunningAgent):
    a, b = stored.ids[:2]
    assert running.agent._residency is not None
    host = running.agent._residency._host
    whole = parts_of(stored, a)
    other = pb.PutAdapterRequest()
    other.CopyFrom(whole[0])
    other.begin.revision_id = b
    nobody = pb.PutAdapterRequest()
    nobody.CopyFrom(whole[0])
    nobody.begin.revision_id = "../../etc"
    for parts, status, words, code in (
        ([], grpc.StatusCode.INVALID_ARGUMENT, "must be `begin`", None),
        (whole[1:], grpc.StatusCode.INVALID_ARGUMENT, "must be `begin`", None),
        (whole[:-1], grpc.StatusCode.FAILED_PRECONDITION, "send it again", "adapter_not_received"),
        ([other, *whole[1:]], grpc.StatusCode.FAILED_PRECONDITION, f"holds {a}", "adapter_malformed"),
        ([nobody, *whole[1:]], grpc.StatusCode.INVALID_ARGUMENT, "begin.revision_id must be", None),
    ):
        async with refused(status, words) as metadata:
            await running.control.PutAdapter(iter(parts), timeout=120)
        assert metadata.get(ERROR_CODE_KEY) == code
        assert (host.used_bytes, len(host.pins), len(host)) == (0, 0, 0)

    async def half_of_it() -> AsyncIterator[pb.PutAdapterRequest]:
        for part in whole[: len(whole) // 2]:
            yield part
        await asyncio.Event().wait()

    leaving = asyncio.ensure_future(running.control.PutAdapter(half_of_it()))
    await until(lambda: host.used_bytes > 0)
    leaving.cancel()
    await until(lambda: (host.used_bytes, len(host.pins), len(host)) == (0, 0, 0))
    async with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        await running.control.PutAdapter(half_of_it(), timeout=0.3)
    await until(lambda: (host.used_bytes, len(host.pins), len(host)) == (0, 0, 0))

    running.engine_is(EngineStatus.DOWN)
    async with refused(grpc.StatusCode.UNAVAILABLE, "the engine of w is not up"):
        await running.control.PutAdapter(iter(whole), timeout=120)
    running.engine_is(EngineStatus.UP, "two")
    running.agent.hub.update(draining=True)
    async with refused(grpc.StatusCode.UNAVAILABLE, "is draining"):
        await running.control.PutAdapter(iter(whole), timeout=120)


async def test_a_prefill_worker_refuses_adapters_for_all_positions(stored: StoredAdapters, tmp_path: Path):
    everywhere = stored.add(write_random_reft(tmp_path / "everywhere", stored.base, 1, positions="all"))

    async with running_agent(stored, tmp_path, role="prefill") as running:
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "only a unified worker can serve") as metadata:
            await running.ensure(everywhere)
        assert metadata[ERROR_CODE_KEY] == "adapter_unsupported"
    async with running_agent(stored, tmp_path, role="unified") as running:
        await running.ensure(everywhere)
        held = running.engine.held[everywhere]
        assert read_packed(held.path).metadata.positions == "all"


async def test_an_agent_starts_without_its_store(stored: StoredAdapters, tmp_path: Path):
    """The store is opened once it can be; until then only loads fail."""
    stored.move_away()
    stored.folder.write_text("no folder")

    async with running_agent(stored, tmp_path) as running:
        async with refused(grpc.StatusCode.UNAVAILABLE):
            await running.ensure(stored.ids[0], deadline_s=0.3)
        stored.folder.unlink()
        stored.move_back()
        await running.ensure(stored.ids[0])


async def test_adapters_of_retracted_requests_are_loaded_again(
    stored: StoredAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A request whose adapter is nowhere ends; one whose store is away waits, and holds up no other."""
    a, b = stored.ids[:2]
    monkeypatch.setattr(unified_agent, "_POLL_S", 0.01)
    monkeypatch.setattr(unified_agent, "_LOAD_AGAIN_TIMEOUT_S", 0.3)
    async with running_agent(stored, tmp_path, role="unified") as running:
        agent, engine = running.agent, running.engine
        assert isinstance(agent, UnifiedAgent)
        monkeypatch.setenv(report.REPORT_DIR_VARIABLE, str(agent.spec.report_dir))
        loading = asyncio.create_task(agent.run_role())
        await asyncio.sleep(0.05)  # nobody has reported anything
        agent.spec.report_dir.mkdir(parents=True)
        report.report_lacking({"one": a, "two": a})
        await until(lambda: a in engine.held)
        report.report_lacking({"lost": f"sha256:{'0' * 64}"})
        await until(lambda: engine.aborted)
        report.report_lacking({})
        # Perhaps it has been tried once more meanwhile, which would wait for the store.
        await until(lambda: "load for lost" not in {each.get_name() for each in asyncio.all_tasks()})

        stored.move_away()
        report.report_lacking({"three": b})
        queue = running.agent._residency._queue  # type: ignore[union-attr]
        for _ in range(2):  # it is tried again after a failure
            await until(lambda: queue.num_waiters)
            assert (await running.ensure(a)).load_s == 0
            await asyncio.sleep(0.05)
            assert queue.num_waiters <= 1
            await until(lambda: not queue.num_waiters)
        stored.move_back()
        await until(lambda: b in engine.held)
        report.report_lacking({})
        assert engine.calls.count(("load", a)) == engine.calls.count(("load", b)) == 1
        assert set(engine.aborted) == {"lost"}
        loading.cancel()


async def test_an_engine_is_told_which_adapters_are_in_memory_only(stored: StoredAdapters, running: RunningAgent):
    """It keeps those until their answers end: retracted, a request would find them nowhere."""
    a, b = stored.ids[:2]
    await running.ensure(a)
    await running.control.PutAdapter(iter(parts_of(stored, b)), timeout=120)

    def is_memory_only(revision_id: str) -> bool:
        config = running.engine.held[revision_id].path.with_name("adapter_config.json")
        return json.loads(config.read_text())["prelude"]["memory_only"]

    assert [is_memory_only(each) for each in (a, b)] == [False, True]


async def test_the_disk_directory_has_a_folder_per_worker(stored: StoredAdapters, tmp_path: Path):
    async with running_agent(stored, tmp_path, disk_directory=tmp_path / "cache") as running:
        await running.ensure(stored.ids[0])
        await until(lambda: running.agent.hub.on_disk)
        assert [path.name for path in (tmp_path / "cache" / "w").iterdir()] == [stored.ids[0].replace(":", "-")]


async def test_loads_of_tenants_take_turns_and_prewarms_come_last(stored: StoredAdapters, tmp_path: Path):
    a, b, c, d, e = stored.ids[:5]
    async with running_agent(stored, tmp_path, parallel_loads=1) as running:
        running.engine.may_answer.clear()
        queue = running.agent._residency._queue  # type: ignore[union-attr]
        calls = []
        for revision_id, tenant in ((a, "many"), (e, "one"), (b, "many"), (c, "many"), (d, "one")):
            request = pb.EnsureAdapterRequest(revision_id=revision_id, tenant=tenant, prewarm=revision_id == e)
            calls.append(asyncio.ensure_future(running.control.EnsureAdapter(request)))
            await until(lambda: len(queue.keys) == len(calls))
        running.engine.may_answer.set()
        await asyncio.gather(*calls)
        assert running.engine.calls == [("load", each) for each in (a, b, d, c, e)]


async def test_a_load_into_an_engine_that_is_about_to_be_up_is_kept(stored: StoredAdapters, running: RunningAgent):
    """It answers before its supervisor has seen that. A load that the engine before it has answered is lost."""
    lost, kept = stored.ids[:2]
    residency = running.agent._residency  # calls are refused now, but some wait in here
    assert residency is not None
    running.engine_is(EngineStatus.DOWN)
    await residency.ensure(lost, 60)  # one process has ended, the others still answer
    assert running.agent.hub.resident == {lost}
    running.engine.held.clear()
    running.engine_is(EngineStatus.STARTING)
    assert running.agent.hub.resident == set()
    running.engine.may_answer.clear()
    loading = asyncio.create_task(residency.ensure(kept, 60))
    await until(lambda: running.engine.calls[-1:] == [("load", kept)])
    running.engine_is(EngineStatus.UP, "two")
    running.engine.may_answer.set()
    await loading
    assert running.agent.hub.resident == {kept}
    for each in (lost, kept):
        await running.ensure(each, deadline_s=20)
    assert running.engine.calls == [("load", each) for each in (lost, kept, lost)]


async def test_an_unusable_disk_directory_is_reported_at_start(stored: StoredAdapters, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(StartError, match=r"cannot use the folder .*; set residency\.disk_directory"):
        async with running_agent(stored, tmp_path, disk_directory=tmp_path / "file"):
            pass


async def test_an_agent_whose_task_fails_does_not_wait_forever(stored: StoredAdapters, tmp_path: Path, monkeypatch):
    exits: list[int] = []

    class SupervisorStandIn:
        progress = 0

        def __init__(self, *_arguments, **_settings) -> None:
            pass

        async def run(self) -> None:
            raise RuntimeError("unforeseen")

    class StuckAgent(UnifiedAgent):
        async def run_role(self) -> None:
            for _ in range(200):
                if exits:
                    break
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)

    monkeypatch.setattr(worker_agent, "EngineSupervisor", SupervisorStandIn)
    monkeypatch.setattr(worker_agent, "_STOP_LIMIT_S", 0.2)
    monkeypatch.setattr(worker_agent.os, "_exit", exits.append)

    async with Engine().served() as engine:
        agent = StuckAgent(configured(stored, tmp_path, "unified", engine), "w", tmp_path / "scratch")
        with pytest.raises(SystemExit):
            async with asyncio.timeout(120):
                await agent.run()
        assert exits == [1]
