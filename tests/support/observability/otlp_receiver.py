"""A collector: receives OTLP over HTTP in a thread of its own, and parses it with OpenTelemetry's protobuf."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from support.in_thread import in_thread
from support.routers.served_routes import served

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

    def wait(self, is_there: Callable[[list[ReceivedSpan]], bool], within_s: float = 120.0) -> list[ReceivedSpan]:
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

    async def export(request: web.Request) -> web.Response:
        await asyncio.to_thread(receiver.take, pb.ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(content_type="application/x-protobuf")

    with in_thread(served([web.post("/v1/traces", export)])) as receiver.url:
        try:
            yield receiver
        finally:
            receiver.may_answer.set()


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
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
