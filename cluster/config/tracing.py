"""Where traces go: `tracing` in cluster.yaml, then the OTEL_* variables of the environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import get_args

from cluster.config.schema import TracingConfig, check_trace_endpoint
from cluster.errors import ConfigError
from process.tracing.span import OtlpProtocol, TraceSettings

_PATH = "/v1/traces"
_PACKAGES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.grpc",  # SGLang imports both
)


def trace_settings(config: TracingConfig, environment: Mapping[str, str] = os.environ) -> TraceSettings | None:
    """The settings with which processes trace requests; None if tracing is off. Raises ConfigError."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = _protocol(environment)
    endpoint = _endpoint(config, environment, protocol)
    if endpoint is None:
        return None
    _check_packages()
    return TraceSettings(
        endpoint=endpoint,
        protocol=protocol,
        sample_ratio=config.sample_ratio,
        continues_client_traces=config.continue_client_traces,
    )


def _endpoint(config: TracingConfig, environment: Mapping[str, str], protocol: OtlpProtocol) -> str | None:
    """As OpenTelemetry has it: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is the whole URL, others lack HTTP's path."""
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    if config.endpoint is None and (whole := environment.get(name)):
        return _checked(name, whole)
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    base = config.endpoint or (_checked(name, given) if (given := environment.get(name)) else None)
    if base is None or protocol == "grpc" or base.endswith(_PATH):
        return base
    return base.rstrip("/") + _PATH


def _protocol(environment: Mapping[str, str]) -> OtlpProtocol:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if value := environment.get(name):
            for protocol in get_args(OtlpProtocol):
                if value == protocol:
                    return protocol
            known = " or ".join(get_args(OtlpProtocol))
            raise ConfigError(f"{name} is {value!r}; set it to {known}")
    return "http/protobuf"


def _checked(name: str, value: str) -> str:
    try:
        return check_trace_endpoint(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error} (found {value!r})") from error


def _check_packages() -> None:
    for package in _PACKAGES:
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise ConfigError(
                f"tracing has an endpoint, but the package {package} is not installed: pip install -e '.[tracing]' in "
                "a checkout of Prelude, or set OTEL_TRACES_EXPORTER=none"
            )
