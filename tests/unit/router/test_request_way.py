"""How many of the router's files a reader of one chat request has to open: those that run while it is answered."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

from support.router_stand_ins import MODEL, ClusterStandIn, running_cluster

import router

_ROUTER = f"{Path(router.__file__).parent}/"
_MOST_FILES = 52  # whoever adds one needs a reason; better, merge two


async def _ask(cluster: ClusterStandIn) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "adapter": "a0", "messages": messages, "stream": True}
    async with cluster.http.post(f"{cluster.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.read()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.sleep(0)  # the endpoint's task ends


async def files_of_the_first_request() -> list[str]:
    """The files, in the order in which the request enters them. It connects to engines and asks the catalog, too."""
    entered: dict[str, None] = {}

    async with running_cluster(heartbeat_s=60.0) as cluster:
        background = asyncio.all_tasks() - {asyncio.current_task()}  # control streams, the audit log

        def note(frame: FrameType, event: str, _argument: object) -> None:
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(_ROUTER) and asyncio.current_task() not in background:
                entered[name.removeprefix(_ROUTER)] = None

        sys.setprofile(note)
        try:
            await _ask(cluster)
        finally:
            sys.setprofile(None)
    return list(entered)


def test_a_request_meets_few_files() -> None:
    files = asyncio.run(files_of_the_first_request())
    assert {"api/request_flow.py", "protocol/validation.py", "placement/placement.py"} <= set(files)  # it does count
    assert len(files) <= _MOST_FILES, "\n".join([f"{len(files)} files:", *files])


if __name__ == "__main__":  # PYTHONPATH=.:tests python tests/unit/router/test_request_way.py
    found = asyncio.run(files_of_the_first_request())
    print(*found, f"{len(found)} files", sep="\n")
