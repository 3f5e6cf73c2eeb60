"""A collector: receives OTLP over HTTP in threads of its own, and parses it with OpenTelemetry's protobuf."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

from process.tracing import start_tracing
from process.tracing.recorded import RecordingTracing
from process.tracing.span import TraceSettings, Tracing


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived. Ids are hexadecimal; `parent_id` is empty for the first span of a trace."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[str, ...]  # ids of spans
    error: str | None  # the status' message if it is an error
    start_ns: int
    end_ns: int


class OtlpReceiver:
    """What a collector got."""

    def __init__(self) -> None:
        self.url = ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_exports = 0
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def wait(self, is_there: Callable[[list[ReceivedSpan]], bool], within_s: float = 30.0) -> list[ReceivedSpan]:
        """All spans, once they are as expected."""
        with self._changed:
            found = self._changed.wait_for(lambda: is_there(self._spans), within_s)
            assert found, [each.name for each in self._spans]
            return list(self._spans)

    def take(self, request: pb.ExportTraceServiceRequest) -> None:
        with self._changed:
            self.num_exports += 1
            self._spans += _received(request)
            self._changed.notify_all()
        self.may_answer.wait(600)


def tracing_to(receiver: OtlpReceiver, instance: str = "here", **changes: Any) -> Tracing:
    """Tracing of this process."""
    base = TraceSettings(f"{receiver.url}/v1/traces", 1.0, True)
    return start_tracing(replace(base, **changes), "test", instance)


def send_all(tracing: Tracing) -> None:
    """End it, however long that takes."""
    if isinstance(tracing, RecordingTracing):
        tracing._provider.force_flush()
    tracing.stop()


def children_of(span: ReceivedSpan, spans: Iterable[ReceivedSpan]) -> list[ReceivedSpan]:
    return [each for each in spans if each.parent_id == span.span_id]


def named(name: str, spans: Iterable[ReceivedSpan]) -> ReceivedSpan:
    """The only span of that name."""
    (found,) = [each for each in spans if each.name == name]
    return found


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector that listens inside the block."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            receiver.take(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _received(request: pb.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for of_process in request.resource_spans:
        resource = _attributes(of_process.resource.attributes)
        for scope in of_process.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    service=str(resource["service.name"]),
                    instance=str(resource.get("service.instance.id", "")),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    attributes=_attributes(span.attributes),
                    events=tuple(event.name for event in span.events),
                    links=tuple(link.span_id.hex() for link in span.links),
                    error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                )


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
