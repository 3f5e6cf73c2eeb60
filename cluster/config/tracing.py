"""Where traces go, as processes need it."""

import importlib.util

from cluster.config.schema import TracingConfig
from cluster.errors import ConfigError
from process.tracing.span import TraceSettings

_PATH = "/v1/traces"
_PACKAGES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.grpc",  # SGLang imports both
)


def trace_settings(config: TracingConfig) -> TraceSettings | None:
    """The settings with which processes trace requests; None if tracing is off. Raises ConfigError."""
    if config.endpoint is None:
        return None
    for package in _PACKAGES:
        try:
            is_there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise ConfigError(
                f"tracing has an endpoint, but the package {package} is not installed: pip install -e '.[tracing]' in "
                "a checkout of Prelude, or remove tracing.endpoint"
            )
    endpoint = config.endpoint if config.endpoint.endswith(_PATH) else config.endpoint.rstrip("/") + _PATH
    return TraceSettings(endpoint, config.sample_ratio, config.continue_client_traces)
