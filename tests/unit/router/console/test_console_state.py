"""GET /console/state, against stand-in workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import REVISION_ID, ClusterStandIn, eventually, hangs, running_cluster
from support.routers.management_calls import ask, id_of, imported, lora, managing, upload

from adapters.files.locked_folder import LockedFolder
from router.console import state as console_state
from router.console.state import ConsoleState, _bounds, _counts
from router.fleet import fleet as fleet_module
from router.generation.request import Request, Requests
from router.identity.access import ANYBODY
from router.management import adapters_http
from router.metrics import Metrics
from router.processes.siblings import Siblings
from router.protocol.validation import Endpoint


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
            "name": "p1",
            "role": "prefill",
            "condition": "placeable",
            "reason": "",
            "domain": "",
            "sequences": 0,
            "queued_prompt_tokens": 0,
            "queue_s": 0.0,
            "prompt_tokens_per_s": 5000.0,
            "kv_used": None,
            "num_in_host_memory": 0,
            "num_on_disk": 0,
            "num_warm": 2,
            "warm_with": ["d0", "d1"],
        }
        load = cluster.decode[1].state.load
        load.used_kv_tokens, load.max_kv_tokens = 25, 100
        await cluster.decode[1].change(ready=False, reason="<b>it restarts</b>")
        await cluster.prefill[0].make_resident(REVISION_ID)

        def has_changed(state: dict[str, Any]) -> bool:
            return state["num_placeable"] == 4 and worker(state, "p0")["num_in_host_memory"] == 1

        state = await eventually(lambda: state_of(cluster), has_changed, within_s=30)
        assert (worker(state, "d1")["condition"], worker(state, "d1")["reason"]) == (
            "not_ready",
            "<b>it restarts</b>",
        )
        assert worker(state, "d1")["kv_used"] == 0.25
        assert worker(state, "p0")["warm_with"] == ["d0"]


@pytest.mark.slow
async def test_requests_tokens_and_first_tokens() -> None:
    async with running_cluster() as cluster:
        (before,) = (await state_of(cluster))["processes"].values()
        cluster.decode[0].engine.behaviours = [hangs]
        asking = asyncio.create_task(cluster.post(prompt="secret", adapter="a0"))

        def waits(state: dict[str, Any]) -> bool:
            phases = [s["phase"] for each in state["requests"] for s in each["sequences"]]
            return phases == ["waiting_first_event"]

        state = await eventually(lambda: state_of(cluster), waits, within_s=30)
        (request,) = state["requests"]
        assert (request["adapter"], request["revision"], request["num_sequences"]) == ("a0", REVISION_ID, 1)
        assert (request["sequences"][0]["prefill"], request["sequences"][0]["decode"]) == ("p0", "d0")
        assert worker(state, "d0")["sequences"] == 1
        assert "secret" not in json.dumps(state)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: state_of(cluster), lambda state: state["num_requests"] == 0, within_s=30)

        await cluster.post(prompt="Hi")  # three tokens, not streamed
        await cluster.stream(prompt="Hi")

        def has_counted(state: dict[str, Any]) -> bool:
            (now,) = state["processes"].values()
            return now["tokens"] == before["tokens"] + 6 and now["first_tokens"][-1:] == [1]

        state = await eventually(lambda: state_of(cluster), has_counted, within_s=30)
        assert len(state["first_token_le_s"]) == len(state["processes"]["0"]["first_tokens"])
        assert state["first_token_le_s"][-1] is None


async def test_however_many_ask_it_is_made_twice_a_second(monkeypatch: Any) -> None:
    now, made = [10.0], []
    state = ConsoleState(None, Requests(), None, clock=lambda: now[0])  # type: ignore[arg-type]

    async def make() -> dict[str, Any]:
        await asyncio.sleep(0)
        made.append(now[0])
        return {"number": len(made)}

    monkeypatch.setattr(state, "_state", make)

    async def ask_of_many() -> set[bytes]:
        answers = await asyncio.gather(*(state.state(None) for _ in range(20)))  # type: ignore[arg-type]
        return {bytes(answer.body) for answer in answers}

    assert await ask_of_many() == {b'{"number":1}'}
    now[0] += 0.4
    assert await ask_of_many() == {b'{"number":1}'}
    now[0] += 0.2
    assert await ask_of_many() == {b'{"number":2}'}


async def test_each_start_of_a_router_has_an_id(tmp_path: Path) -> None:
    def router_of(siblings: Siblings | None) -> str:
        return ConsoleState(None, Requests(), siblings)._router  # type: ignore[arg-type]

    assert router_of(None) != router_of(None)
    folders = [LockedFolder("prelude-router-", "", tmp_path) for _ in range(2)]  # as the supervisor makes one
    first, second = ([router_of(Siblings(number, 3, folder.path)) for number in range(3)] for folder in folders)
    assert len({*first}) == len({*second}) == 1
    assert first[0] != second[0]
    assert all(len(each) == 12 for each in (first[0], second[0], router_of(None)))
    for folder in folders:
        folder.close()
    async with running_cluster(0, 0) as cluster:
        console = _console_of(cluster.server.config.app)
        states = [await console._state() for _ in range(2)]
        assert states[0]["router"] == states[1]["router"] == console._router
        assert states[0]["at_s"] < states[1]["at_s"]


class _TwoProcesses:
    """What one of two processes hears from the other."""

    number, count = 1, 2

    def __init__(self, page: bytes) -> None:
        self._page = page

    async def ask(self, page: str) -> dict[int, bytes]:
        assert page == "console"
        return {0: self._page}


async def test_one_process_answers_for_all() -> None:
    async with running_cluster() as cluster:
        app: Any = cluster.server.config.app
        console = _console_of(app)
        own = json.loads(console.own())
        request = {"request_id": "1", "sequences": []}
        loads = {"d0": [3, 0, 0.0], "p0": [3, 10_000, 2.0]}
        other = {**own, "tokens": 7, "loads": loads, "requests": [request], "num_requests": 5}
        console._siblings = _TwoProcesses(json.dumps(other).encode())
        load = console._backends.fleet.state.loads["p0"]
        load.prompt_tokens, load.queue_s = 5000, 1.0
        state = await console._state()
        assert state["processes"].keys() == {"0", "1"}
        assert state["processes"]["0"]["tokens"] == 7
        assert worker(state, "d0")["sequences"] == 3
        # A worker reads what all processes have placed there.
        assert worker(state, "p0")["queued_prompt_tokens"] == 15_000
        assert worker(state, "p0")["queue_s"] == 3.0
        assert state["num_requests"] == 5
        assert state["requests"] == [{**request, "process": 0}]


def _console_of(app: Any) -> ConsoleState:
    """The state that a running router's pages give to its siblings."""
    pages = next(route.endpoint.__self__ for route in app._app.routes if route.path == "/ready")
    return pages._more_pages["console"].__self__


async def test_what_is_shown_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_cluster(2, 2) as cluster:
        for each in cluster.decode:
            each.engine.behaviours = [hangs] * 4
        asking = [asyncio.create_task(cluster.post(prompt="Hi", n=2, temperature=1)) for _ in range(2)]
        console = _console_of(cluster.server.config.app)

        def hang(state: dict[str, Any]) -> bool:
            return [request["num_sequences"] for request in state["requests"]] == [2, 2]

        state = await eventually(console._state, hang, within_s=30)
        assert [len(request["sequences"]) for request in state["requests"]] == [2, 2]
        assert worker(state, "p0")["warm_with"] == ["d0", "d1"]

        for bound in ("_MAX_WARM", "_MAX_SEQUENCES", "_MAX_REQUESTS"):
            monkeypatch.setattr(console_state, bound, 1)
        state = await console._state()
        assert [len(request["sequences"]) for request in state["requests"]] == [1]
        assert (state["num_requests"], state["requests"][0]["num_sequences"]) == (2, 2)
        assert worker(state, "p0")["warm_with"] == ["d0"]
        assert worker(state, "p0")["num_warm"] == 2
        assert len(state["workers"]) == state["num_workers"] == 4

        monkeypatch.setattr(console_state, "_MAX_WORKERS", 1)
        await cluster.prefill[1].change(ready=False, reason="it restarts")
        state = await eventually(console._state, lambda state: state["num_placeable"] == 3, within_s=30)
        assert [each["name"] for each in state["workers"]] == ["p1"]  # what needs a look comes first
        assert state["num_workers"] == 4
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def test_the_oldest_requests_are_described() -> None:
    requests = Requests()
    for number in range(300):
        requests.add(Request(f"{number:032x}", Endpoint.CHAT, ANYBODY))
    assert [each["request_id"] for each in requests.described(2)] == [f"{0:032x}", f"{1:032x}"]
    assert len(requests.described()) == 300


def test_histograms_of_all_endpoints_are_one() -> None:
    metrics = Metrics()
    metrics.first_byte.labels("chat").observe(0.02)
    metrics.first_byte.labels("completions").observe(0.3)
    families = list(metrics.first_byte.collect())
    bounds, counts = _bounds(families), _counts(families)
    assert bounds[-1] is None
    assert (counts[bounds.index(0.025)], counts[bounds.index(0.5)], counts[-1]) == (1, 2, 2)


async def test_an_adapter_names_the_holders_of_each_revision() -> None:
    async with managing(2, 1) as cluster:
        await imported(cluster, "a0")
        await cluster.prefill[1].make_resident(REVISION_ID)
        await cluster.prefill[0].send_delta(on_disk=[REVISION_ID])
        expected = {"host": ["p1"], "disk": ["p0"], "memory_only": []}
        expected |= {"num_host": 1, "num_disk": 1, "num_memory_only": 0}

        async def holders() -> Any:
            _, adapter = await ask(cluster, "GET", "/v1/adapters/a0")
            return adapter["revisions"][0]["workers"]

        await eventually(holders, lambda found: found == expected, within_s=30)


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
            workers, lambda found: found[1] is not None and found[1].get("num_host") == 3, within_s=30
        )
        assert (middle["host"], middle["disk"], middle["num_disk"]) == (["p0", "p1"], [], 0)
        assert (newest["host"], newest["num_host"]) == ([], 0)
        assert oldest is None
