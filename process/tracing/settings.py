"""What a process must know to trace requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OtlpProtocol = Literal["http/protobuf", "grpc"]


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go, and which requests are traced. The exporter reads headers and timeouts from OTEL_* variables."""

    endpoint: str  # URL; for http/protobuf with the path
    protocol: OtlpProtocol
    sample_ratio: float | None  # of requests that come without a trace; None: as OTEL_TRACES_SAMPLER says, else all
    continues_client_traces: bool  # else a client's traceparent is ignored
