"""Where traces go. What is wrong is named."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support.clusters.configs import config_of

from cluster.agent.engine_spec import engine_spec
from cluster.config.load import load_cluster_config
from cluster.config.schema import TracingConfig
from cluster.config.tracing import trace_settings
from cluster.errors import ConfigError
from engine.arguments import command, environment
from process.tracing.span import TraceSettings

URL = "http://collector:4318"
WORKERS = {"p": {"role": "prefill"}, "d": {"role": "decode"}}


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        ({"sample_ratio": 0.5}, None),
        ({"endpoint": URL}, f"{URL}/v1/traces"),
        ({"endpoint": f"{URL}/"}, f"{URL}/v1/traces"),
        ({"endpoint": f"{URL}/otlp/v1/traces"}, f"{URL}/otlp/v1/traces"),
    ],
)
def test_endpoint(fields: dict[str, Any], endpoint: str | None):
    settings = trace_settings(TracingConfig(**fields))
    assert (settings and settings.endpoint) == endpoint


def test_what_is_sampled_is_passed_on():
    found = trace_settings(TracingConfig(endpoint=URL, sample_ratio=0.25, continue_client_traces=False))
    assert found == TraceSettings(f"{URL}/v1/traces", 0.25, False)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (
            "endpoint: 127.0.0.1:4318",
            r"tracing\.endpoint: expected the URL of a collector, such as .*127\.0\.0\.1:4318",
        ),
        ("sample_ratio: 1.5", r"tracing\.sample_ratio: .*1\.5"),
        ("protocol: grpc", r"tracing\.protocol: it is gone since 0\.2\.0: traces go by OTLP over HTTP"),
        ("enabled: true", r"tracing\.enabled"),
    ],
)
def test_wrong_fields_are_named_with_their_line(field: str, words: str, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {{path: m, name: demo}}\nworkers: {{u: {{role: unified}}}}\ntracing:\n  {field}\n")
    with pytest.raises(ConfigError, match=rf"cluster\.yaml:4: {words}"):
        load_cluster_config(path)


def test_a_missing_package_is_an_error_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert trace_settings(TracingConfig()) is None
    with pytest.raises(ConfigError, match=r"opentelemetry\.sdk is not installed: pip install -e '\.\[tracing\]' in a"):
        trace_settings(TracingConfig(endpoint=URL))


class TestEngines:
    @staticmethod
    def started(**tracing: Any) -> tuple[list[str], dict[str, str]]:
        spec = engine_spec(config_of(WORKERS, tracing=tracing), "p", Path("/scratch"))
        return command(spec), environment(spec, {"OTEL_RESOURCE_ATTRIBUTES": "zone=a"})

    def test_they_record_what_the_router_samples(self):
        words, variables = self.started(endpoint=URL)
        assert "--enable-trace" in words
        assert words[words.index("--otlp-traces-endpoint") + 1] == f"{URL}/v1/traces"
        assert variables["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"
        assert variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
        assert variables["OTEL_RESOURCE_ATTRIBUTES"] == "zone=a,service.instance.id=p"
        assert variables["SGLANG_TRACE_LEVEL"] == "2"

    def test_or_nothing(self):
        words, variables = self.started()
        assert not [word for word in words if "trace" in word]
        assert "OTEL_TRACES_SAMPLER" not in variables
