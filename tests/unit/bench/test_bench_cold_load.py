"""What the cold-load benchmark counts and what it rejects; a small server replaces the router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench import cold_load
from bench.errors import BenchError, SystemFailed
from bench.load.record import Record
from bench.load.strict import closed_load
from bench.workloads.session import Session

FIRST, DONE = b'data: {"choices": [{"text": " a"}]}\n\n', b"data: [DONE]\n\n"
STREAMS = {
    "adapter-0": (0.0, [FIRST, FIRST, DONE]),
    "adapter-1": (0.0, [FIRST, b'data: {"error": {"message": "it went away"}}\n\n']),
    "adapter-2": (0.0, [FIRST]),
    "adapter-3": (0.0, [DONE]),
}


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["stream"]
    request.app["seen"].append(body["adapter"])
    if body["adapter"] not in STREAMS:
        return web.json_response({"error": {"message": "there is no adapter"}}, status=404)
    wait_s, events = STREAMS[body["adapter"]]
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await asyncio.sleep(wait_s)
    for event in events:
        await response.write(event)
    return response


def with_bench(use: Any, **changes: Any) -> list[str]:
    """Run `use(bench)` against the server; returns the requested adapters."""
    seen: list[str] = []

    async def run() -> None:
        app = web.Application()
        app["seen"] = seen
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        options = cold_load.Options(**changes)
        async with aiohttp.ClientSession() as session:
            await use(cold_load._Bench(options, session, url, url, None))  # type: ignore[arg-type]
        await runner.cleanup()

    asyncio.run(run())
    return seen


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "it went away"), (2, r"no \[DONE\]"), (3, "no token"), (4, "there is no adapter \\(status 404")],
)
def test_an_invalid_answer_is_not_timed(number: int, words: str):
    async def use(bench: Any) -> None:
        with pytest.raises(SystemFailed, match=words):
            await bench._requests_per_s([number], 1)

    with_bench(use)


def test_adapters_take_turns_and_whole_answers_count():
    async def use(bench: Any) -> None:
        assert await bench._requests_per_s([0, 0], 5) > 0
        records = await closed_load(bench._endpoint, [bench._session_of(bench._prompts(), 0, 0)], 1)
        assert (records[0].adapter, records[0].prompt_tokens, len(records[0].token_s)) == ("adapter-0", 32, 2)

    assert with_bench(use) == ["adapter-0"] * 6


def test_residents_are_watched_and_arrivals_are_not(monkeypatch: pytest.MonkeyPatch):
    """Every third request is for an arrival; by a load whose times are known."""
    sent: list[tuple[int | None, float]] = []

    async def load(_endpoint: Any, due: list[tuple[Session, float]]) -> list[Record]:
        sent.extend((session.adapter, due_s) for session, due_s in due)
        return [
            Record(session.number, 0, due_s, due_s, due_s + 9, token_s=(due_s + (8 if session.adapter == 9 else 0.5),))
            for session, due_s in due
        ]

    monkeypatch.setattr(cold_load, "open_load", load)

    async def use(bench: Any) -> None:
        assert await bench._watch([0, 1], [9, 9], gap_s=0.25) == 0.5

    with_bench(use, requests_per_cold=2)
    assert sent == [(0, 0.0), (1, 0.25), (9, 0.5), (1, 0.75), (0, 1.0), (9, 1.25)]


def test_each_part_has_adapters_of_its_own():
    options = cold_load.Options(repeats=2, num_single=3, at_once=5, budget=4, overcommit=4, num_resident=2, num_cold=7)
    assert options.num_adapters == 2 * (3 + 5) + 4 * 4 + 2 + 2 * 7


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path):
    with pytest.raises(BenchError, match="there is no folder"):
        cold_load.run(cold_load.QUICK, "prelude bench cold-load", tmp_path / "none" / "x.json", print)
