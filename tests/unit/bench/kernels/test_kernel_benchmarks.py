"""Benchmarks of kernels: how a trace is read, and what is refused. Their runs need an engine or a GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from bench.errors import BenchError, SystemFailed
from bench.kernels import prompt_profile, shrink
from cli.main import main
from process.free_ports import free_port


def event(name: str, category: str, begin: float, duration: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration, "tid": thread}


def test_kernels_are_summed_by_name_and_operators_left_out():
    events = [
        event("expand", "kernel", 0, 100),
        event("shrink", "kernel", 100, 300),
        event("expand", "kernel", 400, 300),
        event("aten::mm", "cpu_op", 0, 5000),
        {"ph": "M", "name": "process_name"},
    ]
    unit, parts = prompt_profile.parts_of(events, 2)
    assert unit == "kernel"
    assert parts == [{"name": "expand", "count": 1.0, "ms": 0.2}, {"name": "shrink", "count": 0.5, "ms": 0.15}]


def test_an_operator_has_its_own_time_without_those_that_it_calls():
    events = [
        event("linear", "cpu_op", 0, 1000),
        event("mm", "cpu_op", 100, 600),
        event("copy", "cpu_op", 200, 100),
        event("add", "cpu_op", 800, 100),
        event("after", "cpu_op", 1000, 50),
        event("elsewhere", "cpu_op", 100, 70, thread=2),
        event("python", "python_function", 0, 9000),
    ]
    unit, parts = prompt_profile.parts_of(events, 1)
    assert unit == "operator"
    own = {part["name"]: round(1000 * part["ms"]) for part in parts}
    assert own == {"linear": 300, "mm": 500, "copy": 100, "add": 100, "after": 50, "elsewhere": 70}
    assert [part["name"] for part in parts][:2] == ["mm", "linear"]


def test_what_cannot_be_measured_is_refused_first(tmp_path):
    with pytest.raises(BenchError, match="--kinds none,loreft: there are plain, none, lora, direft"):
        prompt_profile.run(prompt_profile.Options(kinds=("none", "loreft")), "x", None, print)
    with pytest.raises(SystemExit, match="there is no folder"):
        main(["bench", "prompt-profile", "--json", str(tmp_path / "no" / "a.json")])
    with pytest.raises(BenchError, match="--model tiny: give one of a published model's sizes"):
        shrink.run(shrink.Options(model="tiny"), "x", None, print)


def test_the_shrink_benchmark_needs_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main(["bench", "shrink"])


def test_an_engine_that_is_gone_is_named():
    """So that `running_engine` says why it ended."""

    async def read() -> None:
        async with aiohttp.ClientSession() as session:
            await prompt_profile._Reader(session, f"http://127.0.0.1:{free_port()}", 100).read(8, None)

    with pytest.raises(SystemFailed, match="/v1/completions got no answer: "):
        asyncio.run(read())
