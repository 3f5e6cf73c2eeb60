"""GET /console/state, against stand-in workers."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import REVISION_ID, ClusterStandIn, eventually, hangs, running_cluster
from support.routers.management_calls import ask, id_of, lora, managing, upload
from support.routers.virtual_time import Clock

from router.console import state as console_state
from router.console.state import ConsoleState
from router.fleet import fleet as fleet_module
from router.generation.request import Requests
from router.management import adapters_http


async def state_of(cluster: ClusterStandIn) -> dict[str, Any]:
    status, state = await cluster.admin("/console/state")
    assert status == 200
    return state


def worker(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in state["workers"] if each["name"] == name)


async def test_fleet_and_pairs() -> None:
    async with running_cluster(2, 2, 1) as cluster:
        state = await state_of(cluster)
        assert [each["name"] for each in state["workers"]] == ["d0", "d1", "p0", "p1", "u0"]
        assert (state["num_workers"], state["num_placeable"]) == (5, 5)
        assert worker(state, "p1") | {"num_in_host_memory": 0, "num_on_disk": 0} == {
            "name": "p1", "role": "prefill", "condition": "placeable", "reason": "", "domain": "", "sequences": 0,
            "queued_prompt_tokens": 0, "queue_s": 0.0, "prompt_tokens_per_s": 5000.0, "is_assumed": True,
            "kv_used": None, "num_in_host_memory": 0, "num_on_disk": 0, "num_warm": 2, "warm_with": ["d0", "d1"],
        }  # fmt: skip
        load = cluster.decode[1].state.load
        load.used_kv_tokens, load.max_kv_tokens = 25, 100
        await cluster.decode[1].change(ready=False, reason="<b>it restarts</b>")
        await cluster.prefill[0].make_resident(REVISION_ID)

        def has_changed(state: dict[str, Any]) -> bool:
            return state["num_placeable"] == 4 and worker(state, "p0")["num_in_host_memory"] == 1

        state = await eventually(lambda: state_of(cluster), has_changed, within_s=120)
        changed = worker(state, "d1")
        assert (changed["condition"], changed["reason"]) == ("not_ready", "<b>it restarts</b>")
        assert changed["kv_used"] == 0.25
        assert worker(state, "p0")["warm_with"] == ["d0"]


async def test_tokens_and_first_tokens(cluster: ClusterStandIn) -> None:
    before = await state_of(cluster)
    await cluster.post(prompt="Hi")  # three tokens, not streamed
    await cluster.stream(prompt="Hi")

    def has_counted(now: dict[str, Any]) -> bool:
        return now["tokens"] == before["tokens"] + 6 and now["first_tokens"][-1:] == [1]

    state = await eventually(lambda: state_of(cluster), has_counted, within_s=120)
    assert not any(each["is_assumed"] for each in state["workers"])
    assert len(state["first_token_le_s"]) == len(state["first_tokens"])
    assert state["first_token_le_s"][-1] is None


async def test_however_many_ask_it_is_made_twice_a_second(monkeypatch: Any) -> None:
    clock, numbers = Clock(), count(1)
    state = ConsoleState(None, Requests(), clock)  # type: ignore[arg-type]
    monkeypatch.setattr(state, "_state", lambda: next(numbers))
    for later_s, expected in ((0.0, b"1"), (0.4, b"1"), (0.2, b"2")):
        clock.now += later_s
        for _ in range(20):
            assert (await state.state(None)).body == expected  # type: ignore[arg-type]


async def test_what_is_shown_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(2, 2) as cluster:
        for each in cluster.workers:  # all, as a prompt that is read would no longer be at its worker
            each.engine.behaviours = [hangs] * 4
        asking = [asyncio.create_task(cluster.post(prompt="Hi", n=2, temperature=1)) for _ in range(2)]
        monkeypatch.setattr(console_state, "_MIN_AGE_S", 0.0)

        def hang(state: dict[str, Any]) -> bool:
            at_workers = sum(each["sequences"] for each in state["workers"])
            return at_workers == 2 * 4 and [request["num_sequences"] for request in state["requests"]] == [2, 2]

        state = await eventually(lambda: state_of(cluster), hang, within_s=120)
        assert [len(request["sequences"]) for request in state["requests"]] == [2, 2]
        assert worker(state, "p0")["warm_with"] == ["d0", "d1"]

        for bound in ("_MAX_WARM", "_MAX_SEQUENCES", "_MAX_REQUESTS"):
            monkeypatch.setattr(console_state, bound, 1)
        state = await state_of(cluster)
        assert [len(request["sequences"]) for request in state["requests"]] == [1]
        assert (state["num_requests"], state["requests"][0]["num_sequences"]) == (2, 2)
        assert worker(state, "p0")["warm_with"] == ["d0"]
        assert worker(state, "p0")["num_warm"] == 2
        assert len(state["workers"]) == state["num_workers"] == 4

        monkeypatch.setattr(console_state, "_MAX_WORKERS", 1)
        await cluster.prefill[1].change(ready=False, reason="it restarts")
        state = await eventually(lambda: state_of(cluster), lambda state: state["num_placeable"] == 3, within_s=120)
        assert [each["name"] for each in state["workers"]] == ["p1"]  # what needs a look comes first
        assert state["num_workers"] == 4
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.slow
async def test_the_holders_that_an_adapter_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_http, "_MAX_WITH_WORKERS", 2)
    monkeypatch.setattr(fleet_module, "_MAX_NAMED", 2)
    async with managing(3, 1) as cluster:
        for seed in (1, 2, 3):
            assert (await upload(cluster, lora(tmp_path, seed), name="poet"))[0] == 201
        for each in cluster.prefill:
            await each.make_resident(id_of(tmp_path, 1))
            await each.make_resident(id_of(tmp_path, 2))

        async def workers() -> Any:
            _, adapter = await ask(cluster, "GET", "/v1/adapters/poet")
            assert [each["number"] for each in adapter["revisions"]] == [3, 2, 1]
            return [each["workers"] for each in adapter["revisions"]]

        newest, middle, oldest = await eventually(
            workers, lambda found: found[1] is not None and found[1].get("num_host") == 3, within_s=120
        )
        assert (middle["host"], middle["disk"], middle["num_disk"]) == (["p0", "p1"], [], 0)
        assert (newest["host"], newest["num_host"]) == ([], 0)
        assert oldest is None
