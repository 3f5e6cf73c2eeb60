"""Tracing of one process: nothing when it is off, what happened when it is on, and an end within its bound."""

import asyncio
import socket
import time

import pytest
from support.observability.otlp_receiver import named, otlp_receiver, send_all, tracing_to

from process.tracing import recorded, start_tracing
from process.tracing.span import NO_SPAN


def test_off_has_no_spans():
    """Nor does it load OpenTelemetry: see test_import_rules.py."""
    tracing = start_tracing(None, "prelude-router", "here")
    assert tracing.begin("request", {}) is NO_SPAN
    assert tracing.continued("call", [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")]) is NO_SPAN
    assert (NO_SPAN.child("step"), NO_SPAN.trace_id) == (NO_SPAN, None)
    assert not NO_SPAN.headers


def test_how_a_step_ends_shows():
    class WithCode(Exception):
        code = "too_hot"

    with otlp_receiver() as receiver:
        tracing = tracing_to(receiver, "worker-7")
        root = tracing.begin("request", {})
        for error in (WithCode("secret"), ValueError("secret"), asyncio.CancelledError()):
            with pytest.raises(type(error)), root.child(type(error).__name__):
                raise error
        root.end()
        root.end()
        root.set({"late": 1})
        root.event("late")
        root.fail("late")
        root.stage("stage", 2.0, ended_s_ago=1.0)
        send_all(tracing)
        spans = receiver.spans
    assert [named(name, spans).error for name in ("WithCode", "ValueError")] == ["too_hot", "ValueError"]
    cancelled = named("CancelledError", spans)
    assert (cancelled.error, cancelled.attributes) == (None, {"prelude.cancelled": True})
    assert "secret" not in repr(spans)
    request = named("request", spans)
    assert (request.service, request.instance, request.attributes, request.error) == ("test", "worker-7", {}, None)
    stage = named("stage", spans)
    assert stage.end_ns - stage.start_ns == 2_000_000_000
    assert time.time_ns() - stage.end_ns >= 1_000_000_000


def test_the_end_does_not_wait_for_a_collector_that_is_down(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded, "_STOP_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, otlp_receiver() as receiver:  # it accepts, and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracing = tracing_to(receiver, endpoint=endpoint)
        tracing.begin("request", {}).end()
        started_at = time.monotonic()
        tracing.stop()
        assert time.monotonic() - started_at < 5  # its attempts would last for ten
