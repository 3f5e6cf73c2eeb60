"""Starts the tracing of a process."""

from __future__ import annotations

from process.tracing.settings import TraceSettings
from process.tracing.span import Tracing


def start_tracing(settings: TraceSettings | None, service: str, instance: str) -> Tracing:
    """The tracing of this process, off without settings. `service` and `instance` identify it in every trace."""
    if settings is None:
        return Tracing()
    from process.tracing.recorded import RecordingTracing

    return RecordingTracing(settings, service, instance)
