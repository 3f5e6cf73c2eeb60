"""Spans of requests, sent to an OpenTelemetry collector by OTLP. Off unless a process starts it with settings."""

from process.tracing.span import TraceSettings, Tracing


def start_tracing(settings: TraceSettings | None, service: str, instance: str) -> Tracing:
    """The tracing of this process, off without settings. `service` and `instance` identify it in every trace."""
    if settings is None:
        return Tracing()
    from process.tracing.recorded import RecordingTracing

    return RecordingTracing(settings, service, instance)
