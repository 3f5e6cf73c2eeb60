"""A whole matrix on stand-in servers: what is sent to whom, figures and ratios, files, failures."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from support.bench.started_systems import start_mocks
from support.bench.streaming_mock import MockServer, stream
from support.commands import Prelude

from bench.load.generator import Outcome, generate
from bench.load.options import Load
from bench.matrix import run as matrix_run
from bench.matrix.report import markdown
from bench.matrix.results import FORMAT

WORDS = (
    "bench", "matrix", "pioneer", "--adapters", "1,3", "--systems", "none,stock,unified", "--repeats", "2",
    "--duration-s", "0.1", "--scale", "0.05", "--concurrency", "4",
)  # fmt: skip
SYSTEMS = ("none", "stock", "unified")
NUM_REQUESTS = 6


@pytest.fixture
def servers(monkeypatch) -> dict[str, MockServer]:
    """Three systems that are mock servers."""
    made = {name: MockServer() for name in SYSTEMS}
    start_mocks(monkeypatch, made.__getitem__)
    # So many requests in place of so many seconds, and no process of its own for each load, which takes long.
    monkeypatch.setattr(
        matrix_run,
        "generate",
        lambda load, is_apart: generate(msgspec.structs.replace(load, duration_s=None, num_requests=NUM_REQUESTS)),
    )
    return made


@pytest.fixture
def matrix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Prelude:
    return Prelude(capsys, (*WORDS, "--json", str(tmp_path / "m.json")))


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "m.json").read_text())


@pytest.mark.slow
def test_every_system_gets_the_same_loads_and_one_report(servers, tmp_path, matrix):
    shown = matrix.prints()
    found = read(tmp_path)
    assert found["format"] == FORMAT
    assert found["command"].startswith("prelude bench matrix pioneer")
    order = [(each["repeat"], each["cell"], each["system"]) for each in found["loads"]]
    there = [(cell, system) for cell in ("pioneer, n = 1", "pioneer, n = 3") for system in SYSTEMS]
    assert order == [(0, *each) for each in there] + [(1, *each) for each in reversed(there)]
    prompts = {name: {str(body["prompt"]) for body in server.bodies} for name, server in servers.items()}
    assert prompts["stock"] == prompts["unified"] == prompts["none"]
    assert len(prompts["none"]) == 2 * 2 * 2 * NUM_REQUESTS  # cells, repeats, warm-up and load: all differ
    assert not any("lora_path" in body for body in servers["none"].bodies)
    assert {body["lora_path"] for body in servers["unified"].bodies} == {"a0", "a1", "a2"}
    assert {(each["system"], each["to"]) for each in found["ratios"]} == {("none", "stock"), ("unified", "stock")}
    assert {each["system"] for each in found["evenness"]} == set(SYSTEMS)
    assert all(0 < each["worst_over_best"] <= 1 for each in found["evenness"])
    assert "| unified |" in shown
    assert shown.rstrip().endswith(markdown(found).rstrip())


@pytest.mark.slow
def test_failed_requests_are_counted_and_a_system_without_any_answer_ends_the_run(servers, tmp_path, matrix):
    asked = 0

    async def every_other(server, request, body):
        nonlocal asked
        asked += 1
        return await stream(server, request, body) if asked % 2 else matrix_error()

    servers["unified"].answer = every_other
    matrix.prints("--repeats", "1")
    found = read(tmp_path)
    failed = [each["summary"]["num_failed"] for each in found["loads"] if each["system"] == "unified"]
    assert min(failed) > 0
    assert f"{failed[0]} of {NUM_REQUESTS}" in markdown(found)

    async def never(server, request, body):
        return matrix_error()

    servers["unified"].answer = never
    matrix.refuses(says="unified: every request of pioneer, n = 1 failed: error_answer: out of luck")
    kept = read(tmp_path)
    assert [each["system"] for each in kept["loads"]] == ["none", "stock"]  # what was measured before
    assert {each["system"] for each in kept["figures"]} == {"none", "stock"}


@pytest.mark.slow
def test_the_file_is_whole_after_each_load(servers, tmp_path, matrix):
    """A machine may be gone before the last one."""
    seen: list[dict] = []

    async def reads(server, request, body):
        seen.append(read(tmp_path))
        return await stream(server, request, body)

    servers["unified"].answer = reads
    matrix.prints("--repeats", "1")
    assert [each["system"] for each in seen[0]["loads"]] == ["none", "stock"]
    assert {each["system"] for each in seen[0]["figures"]} == {"none", "stock"}
    assert {(each["system"], each["to"]) for each in seen[0]["ratios"]} == {("none", "stock")}


def test_ctrl_c_in_a_warm_up_ends_the_run(servers, matrix, monkeypatch):
    asked = []

    async def stopped(load: Load, is_apart: bool) -> Outcome:
        asked.append(load)
        return Outcome((), 0.0, 1, is_stopped=True)

    monkeypatch.setattr(matrix_run, "generate", stopped)
    matrix.refuses(says="stopped after 0 loads")
    assert len(asked) == 1


def matrix_error() -> web.Response:
    return web.json_response({"error": {"message": "out of luck"}}, status=503)
