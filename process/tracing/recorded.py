"""Spans that OpenTelemetry records. They are queued, and a thread exports them.

Neither waits for the collector: the queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE), and a full one drops its oldest spans.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from process.tracing.span import NO_SPAN, Attributes, Kind, Span, TraceSettings, Tracing

_LIMITS = SpanLimits(max_span_attributes=32, max_events=32, max_links=8, max_span_attribute_length=256)
_MAX_HEADER = 512  # characters; longer ones are as if they were not there
_STOP_S = 2.0

_propagator = TraceContextTextMapPropagator()


class RecordedSpan(Span):
    """A span that is exported when it ends."""

    __slots__ = ("_context", "_span", "_tracer")
    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        super().__init__(_id_of(span))
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())

    @property
    def headers(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        _propagator.inject(headers, self._context)
        return headers

    def child(self, name: str, attributes: Attributes | None = None, kind: Kind = "internal") -> Span:
        span = self._tracer.start_span(name, self._context, trace.SpanKind[kind.upper()], attributes)
        return RecordedSpan(self._tracer, span)

    def stage(self, name: str, duration_s: float, *, ended_s_ago: float = 0.0) -> None:
        ended_at = time.time_ns() - int(ended_s_ago * 1e9)
        span = self._tracer.start_span(name, self._context, start_time=ended_at - int(duration_s * 1e9))
        span.end(ended_at)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        if self._span.is_recording():
            self._span.add_event(name)

    def link(self, other: Span) -> None:
        if self._span.is_recording() and isinstance(other, RecordedSpan):
            self._span.add_link(other._span.get_span_context())

    def fail(self, code: str) -> None:
        if self._span.is_recording():
            self._span.set_attribute("error.type", code)
            self._span.set_status(trace.StatusCode.ERROR, code)

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.set({"prelude.cancelled": True})
        elif error is not None:
            code = getattr(error, "code", None)
            self.fail(code if isinstance(code, str) else type(error).__name__)
        self.end()


class RecordingTracing(Tracing):
    """Tracing that is on. Starts the thread of the exporter."""

    __slots__ = ("_continues_client_traces", "_provider", "_tracer")
    is_on = True

    def __init__(self, settings: TraceSettings, service: str, instance: str) -> None:
        # These log what clients wrote.
        for name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
            logging.getLogger(name).setLevel("ERROR")
        self._continues_client_traces = settings.continues_client_traces
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(settings.sample_ratio),
            resource=Resource.create({SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance}),
            span_limits=_LIMITS,
            shutdown_on_exit=False,  # it would wait for a collector that is down
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
        self._tracer = self._provider.get_tracer("prelude")

    def begin(self, name: str, headers: Mapping[bytes, bytes]) -> Span:
        context = Context()
        if self._continues_client_traces and b"traceparent" in headers:
            given = {key.decode(): headers[key].decode("latin-1") for key in _HEADERS if key in headers}
            context = _context_of(given)
        return self._begun(name, context)

    def continued(self, name: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
        given = {key: value for key, value in metadata or () if isinstance(value, str)}
        context = _context_of(given)
        if not trace.get_current_span(context).get_span_context().is_valid:
            return NO_SPAN
        return self._begun(name, context)

    def stop(self) -> None:
        ending = threading.Thread(target=self._provider.shutdown, name="end of tracing", daemon=True)
        ending.start()
        ending.join(_STOP_S)

    def _begun(self, name: str, context: Context) -> Span:
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER)
        return RecordedSpan(self._tracer, span) if span.is_recording() else Span(_id_of(span))


_HEADERS = (b"traceparent", b"tracestate")


def _context_of(carrier: Mapping[str, str]) -> Context:
    """The caller's trace; an empty context if its header is malformed."""
    bounded = {key: value for key, value in carrier.items() if len(value) <= _MAX_HEADER}
    return _propagator.extract(bounded, Context())


def _id_of(span: trace.Span) -> str:
    return trace.format_trace_id(span.get_span_context().trace_id)
