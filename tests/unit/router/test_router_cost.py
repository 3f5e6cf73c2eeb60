"""What a request and a placement cost, in calls of functions: equal on every machine.

Whoever needs more for a feature raises the number, knowingly: 100 calls are 15 to 20 µs of every request. And what a
request leaves behind, and how many of the router's files a reader of one has to open.
"""

import asyncio
import gc
import re
import statistics
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from support.calls import Calls
from support.router_stand_ins import MODEL, ClusterStandIn, running_cluster
from support.routers.fleets import place_many

import router
from router.placement.placer import Placer

_ROUTER = str(Path(router.__file__).parent)
_FOLLOWS_WORKERS = f"{_ROUTER}/fleet/"  # also between requests
_MOST_FILES = 30  # whoever adds one needs a reason; better, merge two


async def ask(cluster: ClusterStandIn, **fields: Any) -> bytes:
    """A whole answer, after which nothing of the request runs."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    async with cluster.http.post(f"{cluster.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.read()
        found = await answer.read()
    await asyncio.sleep(0)  # the endpoint's task ends
    return found


def _is_of_request(code: CodeType) -> bool:
    return code.co_filename.startswith(_ROUTER) and not code.co_filename.startswith(_FOLLOWS_WORKERS)


@pytest.mark.parametrize(("is_streaming", "most"), [(True, 340), (False, 272)])
async def test_a_request_on_a_pair(is_streaming: bool, most: int, cluster: ClusterStandIn) -> None:
    numbers = []
    await ask(cluster, stream=is_streaming)
    for _ in range(7):
        with Calls(_is_of_request) as calls:
            await ask(cluster, stream=is_streaming)
        numbers.append(calls.number)
    assert statistics.median(numbers) <= most


@pytest.fixture
def placement_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls of each placement."""
    place, numbers = Placer.place, list[int]()

    def counted(*arguments: Any) -> Any:
        with Calls(lambda code: code.co_filename.startswith(_ROUTER)) as calls:
            placement = place(*arguments)
        numbers.append(calls.number)
        return placement

    monkeypatch.setattr(Placer, "place", counted)
    return numbers


def test_a_placement_is_no_dearer_with_more_adapters(placement_calls: list[int]) -> None:
    place_many(200, num_resident=1000)
    few = statistics.median(placement_calls)
    placement_calls.clear()
    place_many(200, num_resident=20_000)
    assert statistics.median(placement_calls) <= few + 5
    assert few <= 60


def test_a_change_of_the_fleet_costs_the_next_placement_no_look_at_every_pair(placement_calls: list[int]) -> None:
    place_many(20, num_resident=100, is_changing=True)
    assert statistics.median(placement_calls) <= 6 * (64 + 256)  # not 64 x 256


# ---- what it leaves behind: nothing that waits for the garbage collector, which would stop every stream -------------


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"adapter": "a0", "stream": True}, {"n": 2}])
async def test_a_request_leaves_no_circles(fields: dict[str, object], cluster: ClusterStandIn) -> None:
    await ask(cluster, **fields)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            await ask(cluster, **fields)
        gc.collect()
        found = {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("router.")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found == set()


# ---- the files that run while one chat request is answered ----------------------------------------------------------


async def files_of_the_first_request() -> list[str]:
    """The files, each time that it enters one. It connects to engines and asks the catalog, too."""
    entered: list[str] = []

    async with running_cluster(heartbeat_s=60.0) as cluster:
        background = asyncio.all_tasks() - {asyncio.current_task()}  # control streams, the audit log

        def note(frame: FrameType, event: str, _argument: object) -> None:
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(f"{_ROUTER}/") and asyncio.current_task() not in background:
                entered.append(f"router/{name.removeprefix(f'{_ROUTER}/')}")

        sys.setprofile(note)
        try:
            assert (await ask(cluster, adapter="a0", stream=True)).endswith(b"data: [DONE]\n\n")
        finally:
            sys.setprofile(None)
    return entered


def walk() -> list[str]:
    """The router's files of the walk for newcomers, in order; the others are of a worker's processes."""
    text = (Path(_ROUTER).parent / "docs" / "architecture.md").read_text()
    (steps,) = re.findall(r"^## A walk for newcomers\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    files = re.findall(r"^\d+\. \*\*\w+\*\* · `([^`]+)`", steps, re.MULTILINE)
    return [file for file in files if file.startswith("router/")]


async def test_a_request_meets_few_files_and_those_of_the_walk_in_its_order() -> None:
    entered = await files_of_the_first_request()
    files = list(dict.fromkeys(entered))
    assert len(files) <= _MOST_FILES, "\n".join([f"{len(files)} files:", *files])
    *way, relay = walk()
    assert len(way) > 5
    assert [file for file in files if file in way] == way
    assert entered.index(way[-1]) < len(entered) - entered[::-1].index(relay)  # the way back comes last
