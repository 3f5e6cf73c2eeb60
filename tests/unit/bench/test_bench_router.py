"""What the relay benchmark measures, what it rejects, and a run of it with real processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench import router_relay
from bench.errors import BenchError, SystemFailed, WrongAnswer
from bench.measuring.http_load import HttpLoad, http_load
from bench.router_relay import Measurement, summary
from bench.systems.routers import gateway_python, request_bytes, workers

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT, DONE = b"data: {}\n\n", b"data: [DONE]\n\n"


def stream(*events: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


async def load_on(answer: bytes, num_requests: int = 6, **options: Any) -> HttpLoad:
    """Put a load on a server that gives one answer to everything, and then closes if it is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["messages"]
                if not answer:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        request = request_bytes(is_streaming=True, num_events=2)
        return await http_load(port, request, num_requests, 2, **{"num_events": 2, "timeout_s": 5, **options})


async def test_every_event_and_every_first_one_counts():
    done = await load_on(stream(EVENT, EVENT, DONE))
    assert (len(done.first_s), done.num_events) == (6, 18)
    assert all(0 < first_s < done.duration_s for first_s in done.first_s)


async def test_connections_may_begin_spread_over_a_time():
    done = await load_on(
        stream(EVENT, EVENT, DONE), num_requests=2, spread_s=0.5
    )  # two connections, the second after 0.25 s
    assert len(done.first_s) == 2
    assert done.duration_s > 0.2
    assert max(done.first_s) < done.duration_s


async def test_a_failure_ends_a_load_whose_connections_have_not_all_begun():
    with pytest.raises(SystemFailed, match="ended before its answer"):
        await load_on(b"", spread_s=1.0)


def test_a_prefill_worker_answers_at_once_also_with_a_stream():
    """A gateway asks it for a stream of the whole answer, as the client did, and waits for its end."""
    found = workers(64, 5.0)
    assert [(each.role, each.num_events, each.event_gap_s) for each in found.values()] == [
        ("prefill", 1, 0.0), ("decode", 64, 5.0)
    ]  # fmt: skip


async def test_a_short_answer_has_no_events():
    done = await load_on(whole(200, b'{"choices": []}'), num_events=0)
    assert (len(done.first_s), done.num_events) == (6, 0)


@pytest.mark.parametrize(
    "answer",
    [
        whole(500, b"{}"),
        stream(EVENT, DONE),
        stream(EVENT, EVENT, EVENT),
        stream(EVENT, EVENT, b'data: {"error": 1}\n\n'),
        b"\x00\x01",
    ],
)
async def test_a_wrong_answer_is_not_measured(answer: bytes):
    with pytest.raises(WrongAnswer):
        await load_on(answer)


async def test_a_server_that_is_silent_is_a_failure():
    with pytest.raises(SystemFailed, match="0 of 6 answers within"):
        await load_on(HEAD, timeout_s=0.2)


def measured(
    system: str, repeat: int, cpu_s: float, p50: float, *, is_streaming: bool = True, is_spread: bool = False
) -> Measurement:
    count = 1000 if is_streaming else 0
    return Measurement(system, 32, is_streaming, repeat, 100, count, 1.0, cpu_s, p50, 2 * p50, 0.0, is_spread)


def test_the_summary_has_medians_per_event_and_per_request():
    found = summary(
        [
            *(measured("ours", repeat, cpu_s, 3.0) for repeat, cpu_s in enumerate((0.01, 0.02, 0.09))),
            measured("ours", 0, 0.04, 9.0, is_streaming=False),
            measured("ours", 0, 0.3, 1.5, is_spread=True),
            measured("direct", 0, 0.0, 1.0),
            measured("direct", 0, 0.0, 0.5, is_spread=True),
        ]
    )
    assert found["ours"] == {
        "first_event_ms_p50": {"32": 3.0},
        "first_event_ms_p99": {"32": 6.0},
        "spread_first_event_ms_p50": {"32": 1.5},
        "spread_first_event_ms_p99": {"32": 3.0},
        "cpu_us_per_event": {"32": 20.0},
        "cpu_us_per_request": {"32": 400.0},
        "added_first_event_ms_p50": {"32": 2.0},
        "added_first_event_ms_p99": {"32": 4.0},
        "added_spread_first_event_ms_p50": {"32": 1.0},
        "added_spread_first_event_ms_p99": {"32": 2.0},
    }
    assert {name.removeprefix("spread_") for name in found["direct"]} == {"first_event_ms_p50", "first_event_ms_p99"}


def test_another_version_of_the_gateway_is_refused(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.1.0\n")
    python.chmod(0o755)
    with pytest.raises(BenchError, match=r"has sglang-router 0.1.0; the comparison is with 0.3.2"):
        gateway_python(str(python))
    with pytest.raises(BenchError, match="No such file"):
        gateway_python(str(tmp_path / "none"))


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_relay, "gateway_python", lambda given: None)
    lines: list[str] = []
    options = router_relay.Options((8,), 1, 32, streams_per_connection=5, requests_per_connection=15, protected=True)
    router_relay.run(options, None, "prelude bench router", tmp_path / "x.json", lines.append)
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["ours"]["cpu_us_per_event"]["8"] > 0
    assert document["ours_protected"]["cpu_us_per_request"]["8"] > 0
    assert document["ours"]["spread_first_event_ms_p99"]["8"] > 0
    assert {each["system"] for each in document["repeats"]} == {"ours", "ours_protected", "direct"}
    assert "sglang_router" not in document
    assert "CPU per streamed event, 8 at a time" in lines[-1]
