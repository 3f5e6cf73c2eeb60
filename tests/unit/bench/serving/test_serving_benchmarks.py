"""What the benchmarks of serving make of an engine's metrics and of their loads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from bench.errors import BenchError, SystemFailed
from bench.serving import first_token, streams
from bench.serving.first_token import config_of


def test_a_pair_is_spread_over_two_gpus(tmp_path: Path) -> None:
    def gpus(layout: str, count: int) -> dict[str, object]:
        options = first_token.Options(num_gpus=count, device="cuda", prompt_tokens=(512, 4096))
        config = config_of(options, layout, tmp_path)
        assert config.engine.max_total_tokens == 16 * 4096
        return {name: worker.gpus for name, worker in config.workers.items()}

    assert gpus("pair", 1) == {"prefill-0": None, "decode-0": None}
    assert gpus("pair", 2) == {"prefill-0": 1, "decode-0": 1}
    assert gpus("unified", 2) == {"unified-0": 1}


@pytest.mark.parametrize("layouts", [(), ("pair", "three")])
def test_layouts_that_there_are_not(layouts: tuple[str, ...]) -> None:
    with pytest.raises(BenchError, match="there are pair, unified"):
        first_token.Options(layouts=layouts).check()


def row(bound: int, streamed: bool, rate: float, per_event: float) -> dict[str, object]:
    return {"bound": bound, "repeat": 0, "streamed": streamed, "requests_per_s": rate, "tokens_per_event": per_event}


def test_streams_are_compared_with_whole_answers_of_the_same_engine() -> None:
    rows = [row(0, True, 9.0, 1), row(0, False, 10.0, 8), row(0, True, 7.0, 1), row(0, True, 8.0, 1)]
    whole, streamed = streams.medians([*rows, row(50, True, 9.5, 4)])[:2]
    assert whole == {"bound": 0, "streamed": False, "requests_per_s": 10.0, "tokens_per_event": 8}
    assert streamed == {
        "bound": 0, "streamed": True, "requests_per_s": 8.0, "tokens_per_event": 1, "of_not_streamed": 0.8
    }  # fmt: skip
    assert "of_not_streamed" not in streams.medians([row(50, True, 9.5, 4)])[0]


@pytest.mark.parametrize(
    ("end", "is_whole"),
    [(b"data: [DONE]\n\n", True), (b"", False), (b'data: {"error": {}}\n\ndata: [DONE]\n\n', False)],
)
def test_a_stream_that_breaks_is_no_answer(end: bytes, is_whole: bool) -> None:
    async def scenario() -> int:
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(body=b'data: {"choices": []}\n\n' * 3 + end, content_type="text/event-stream")

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
            async with aiohttp.ClientSession() as session:
                return (await streams._ask(session, url, {"stream": True})).events
        finally:
            await runner.cleanup()

    if is_whole:
        assert asyncio.run(scenario()) == 3
    else:
        with pytest.raises(SystemFailed, match="a stream ends with"):
            asyncio.run(scenario())
