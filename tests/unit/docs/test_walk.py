"""The walk for newcomers is the way that a request takes: its files of the router are entered in the walk's order."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import FrameType

import openai
import pytest
from support.router_stand_ins import MODEL, running_cluster

ROOT = Path(__file__).parents[3]
ROUTER = f"{ROOT}/router/"


def walk() -> list[str]:
    """The router's files of the walk, in order; the others are of a worker's processes."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (steps,) = re.findall(r"^## A walk for newcomers\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return [
        file
        for file in re.findall(r"^\d+\. \*\*\w+\*\* · `([^`]+)`", steps, re.MULTILINE)
        if file.startswith("router/")
    ]


async def files_of_a_request() -> list[str]:
    """The router's files in the order in which a streamed chat request under an adapter enters and re-enters them."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROUTER) and not is_background():
            entered.append(name.removeprefix(f"{ROOT}/"))

    def is_background() -> bool:
        task = asyncio.current_task()
        return task is None or task.get_name().startswith("follow ")  # a worker's control stream

    async with running_cluster(heartbeat_s=60.0) as cluster:
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        sys.setprofile(note)
        try:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body={"adapter": "a0"}
            )
            answer = [chunk.choices[0].delta.content async for chunk in stream]
        finally:
            sys.setprofile(None)
        assert "".join(word for word in answer if word) == "Hello wide world"
    return entered


def is_met_in_order(files: list[str], entered: list[str]) -> bool:
    """Each file is entered for the first time after the one before it; the last one, the way back, comes last."""
    *way, relay = files
    if not {*files} <= {*entered}:
        return False
    firsts = [entered.index(file) for file in way]
    return firsts == sorted(firsts) and firsts[-1] < len(entered) - entered[::-1].index(relay)


@pytest.mark.slow
def test_a_request_meets_the_walks_files_in_order():
    files, entered = walk(), asyncio.run(files_of_a_request())
    assert len(files) > 5
    assert is_met_in_order(files, entered), list(dict.fromkeys(entered))


def test_another_order_is_not_the_requests():
    entered = ["a", "relay", "b", "a", "c", "relay", "a"]
    assert is_met_in_order(["a", "b", "c", "relay"], entered)
    assert not is_met_in_order(["b", "a", "c", "relay"], entered)
    assert not is_met_in_order(["a", "relay", "c", "b"], entered)
    assert not is_met_in_order(["a", "b", "nothing", "relay"], entered)
