"""How many of the router's files a reader of one chat request has to open: those that run while it is answered."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import FrameType

from support.router_stand_ins import MODEL, ClusterStandIn, running_cluster

import router

_ROUTER = Path(router.__file__).parent
_MOST_FILES = 30  # whoever adds one needs a reason; better, merge two


async def _ask(cluster: ClusterStandIn) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "adapter": "a0", "messages": messages, "stream": True}
    async with cluster.http.post(f"{cluster.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.read()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.sleep(0)  # the endpoint's task ends


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
            await _ask(cluster)
        finally:
            sys.setprofile(None)
    return entered


def walk() -> list[str]:
    """The router's files of the walk for newcomers, in order; the others are of a worker's processes."""
    text = (_ROUTER.parent / "docs" / "architecture.md").read_text()
    (steps,) = re.findall(r"^## A walk for newcomers\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    files = re.findall(r"^\d+\. \*\*\w+\*\* · `([^`]+)`", steps, re.MULTILINE)
    return [file for file in files if file.startswith("router/")]


def test_a_request_meets_few_files_and_those_of_the_walk_in_its_order() -> None:
    entered = asyncio.run(files_of_the_first_request())
    files = list(dict.fromkeys(entered))
    assert len(files) <= _MOST_FILES, "\n".join([f"{len(files)} files:", *files])
    *way, relay = walk()
    assert len(way) > 5
    assert [file for file in files if file in way] == way
    assert entered.index(way[-1]) < len(entered) - entered[::-1].index(relay)  # the way back comes last


if __name__ == "__main__":  # PYTHONPATH=.:tests python tests/unit/router/test_request_way.py
    found = dict.fromkeys(asyncio.run(files_of_the_first_request()))
    print(*found, f"{len(found)} files", sep="\n")
