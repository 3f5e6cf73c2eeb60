"""One step of a request, as a span of its trace. What is here records nothing: tracing is off, or it is not sampled.

OpenTelemetry is imported by `process.tracing.recorded` only, which a process loads when its tracing is on. Attributes
never hold what a client wrote but names that were resolved: no prompt, no message of an error, no header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

Kind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go, and which requests are traced. The exporter reads headers and timeouts from OTEL_* variables."""

    endpoint: str  # URL with the path
    sample_ratio: float  # of requests that come without a trace
    continues_client_traces: bool  # else a client's traceparent is ignored


class Span:
    """A step. As a context it ends with the block, and its error is the block's.

    This one records nothing, and has no headers, so no other process records anything; its trace may have an id.
    """

    __slots__ = ("trace_id",)
    is_recorded = False  # is it exported?

    def __init__(self, trace_id: str | None = None) -> None:
        self.trace_id = trace_id  # 32 hexadecimal digits

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells another process that its work is part of this step: HTTP headers, or metadata of gRPC."""
        return _NO_HEADERS

    def child(self, name: str, attributes: Attributes | None = None, kind: Kind = "internal") -> Span:
        """A step inside this one, which begins now. It may outlast this one."""
        return self

    def stage(self, name: str, duration_s: float, *, ended_s_ago: float = 0.0) -> None:
        """Record a step inside this one that has ended already."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def event(self, name: str) -> None:
        """Record that something happens now."""

    def link(self, other: Span) -> None:
        """Name a span of another trace that this step waits for."""

    def fail(self, code: str) -> None:
        """Mark the step as failed, with the code of its error."""

    def end(self) -> None:
        """The step has ended. What is told of it later is ignored. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NO_SPAN = Span()


class Tracing:
    """Begins the spans of one process. This one is off."""

    __slots__ = ()
    is_on = False

    def begin(self, name: str, headers: Mapping[bytes, bytes]) -> Span:
        """The span of a client's request, in the trace that its `traceparent` names if that is well-formed."""
        return NO_SPAN

    def continued(self, name: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
        """The span of another process's call. Without a sampled trace in its metadata nothing is recorded."""
        return NO_SPAN

    def stop(self) -> None:
        """Send what is queued, for two seconds at most."""
