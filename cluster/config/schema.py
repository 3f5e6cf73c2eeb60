"""The schema of `cluster.yaml`, which describes a cluster. Read once, validated, passed down.

New fields have defaults, and a field never changes its meaning. Names of durations end in `_s`, for seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)


def _resolve_path(path: Path, info: ValidationInfo) -> Path:
    """Expand `~`, and resolve against the context's `folder` where there is one."""
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"the home directory of {path.parts[0]} is unknown") from error
    folder: Path | None = (info.context or {}).get("folder")
    return path if folder is None else folder / path


# Every path of cluster.yaml: relative ones start at the file's folder, which `load_cluster_config` passes as context.
ConfigPath = Annotated[Path, AfterValidator(_resolve_path)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Port = Annotated[int, Field(ge=0, le=65535)]  # 0: `prelude up` picks a free port
Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """The one base model that the cluster serves."""

    path: ConfigPath  # Hugging Face directory; relative paths start at cluster.yaml's folder
    name: Name  # the base model's name in requests
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class EngineConfig(_Section):
    """Settings of every SGLang engine of the cluster."""

    device: Literal["cpu", "cuda"] = "cpu"
    max_total_tokens: Annotated[int, Field(ge=64)] | None = None  # KV cache capacity; None: as much as fits in memory
    max_running_requests: Annotated[int, Field(ge=1)] = 64
    chunked_prefill_tokens: Annotated[int, Field(ge=1)] = 2048
    context_length: Annotated[int, Field(ge=8)] | None = None  # None: the model's maximum
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    start_timeout_s: Seconds = 600.0
    extra_arguments: tuple[str, ...] = ()  # appended to SGLang's command line


class AdapterLimits(_Section):
    """Limits on adapters, checked at import and by workers."""

    max_rank: Annotated[int, Field(ge=1, le=512)] = 64
    max_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3  # of an adapter's files
    slots: Annotated[int, Field(ge=1)] = 8  # distinct adapters in one prefill batch
    target_modules: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip


class AdapterConfig(_Section):
    """An adapter that the router imports at start: a directory in one of the formats of docs/adapter-formats.md."""

    path: ConfigPath


class CatalogConfig(_Section):
    """The database of adapters. All routers must use the same one."""

    url: str | None = None  # sqlite:////absolute/file or postgresql://…; None: .prelude/catalog.db beside cluster.yaml


class StoreConfig(_Section):
    """The folder or bucket of adapters' files. All routers and workers must use the same one.

    Bucket credentials come from the environment, as for every AWS client.
    """

    url: str | None = None  # file:///folder or s3://bucket/prefix; None: .prelude/store beside cluster.yaml
    s3_endpoint_url: str | None = None  # None: AWS
    s3_region: str | None = None


class ResidencyConfig(_Section):
    """How many adapters a worker caches in host memory and on disk, and how it loads them."""

    disk_bytes: Annotated[int, Field(ge=0)] = 64 * 1024**3  # size of the disk cache
    disk_directory: ConfigPath | None = None  # has a folder per worker; None: .prelude/cache beside cluster.yaml
    host_bytes: Annotated[int, Field(ge=1)] = 8 * 1024**3  # size of the cache in host memory
    parallel_loads: Annotated[int, Field(ge=1)] = 8  # concurrent loads
    queued_loads: Annotated[int, Field(ge=1)] = 256  # loads waiting for them; more are refused with a retry-after
    lease_s: Seconds = 0.5  # no eviction for this long after a request ensured a revision, until the engine counts it


class WorkerConfig(_Section):
    """One worker: an agent and the engine that it supervises. A port of 0 is chosen at start."""

    role: Literal["prefill", "decode", "unified"]  # unified: prefill and decode in one engine
    host: str = "127.0.0.1"
    control_port: Port = 0  # the agent's gRPC
    metrics_port: Port = 0  # the agent's HTTP: /metrics, /health, /ready
    engine_port: Port = 0  # SGLang's HTTP
    bootstrap_port: Port = 0  # prefill only: where decode engines request KV
    engine: dict[str, object] = Field(default_factory=dict)  # overrides of the cluster's `engine` section

    @property
    def holds_adapters(self) -> bool:
        return self.role != "decode"


class RouterConfig(_Section):
    """The router: its HTTP server, its timeouts and retries."""

    host: str = "127.0.0.1"
    port: Port = 8000
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024**2
    max_choices: Annotated[int, Field(ge=1)] = 128  # sequences of one request: prompts x n
    connect_timeout_s: Seconds = 5.0
    adapter_timeout_s: Seconds = 60.0  # to load a cold adapter
    first_event_timeout_s: Seconds = 300.0  # queueing, prefill and KV transfer
    event_gap_timeout_s: Seconds = 120.0  # between two events of a stream
    answer_timeout_s: Seconds = 1800.0  # a complete answer without streaming; on unified workers including prefill
    body_timeout_s: Seconds = 60.0  # to receive a client's request
    heartbeat_s: Seconds = 2.0  # longest gap in a worker's state stream; a worker that misses three gets no requests
    max_attempts: Annotated[int, Field(ge=1)] = 3  # placements tried per sequence
    drain_timeout_s: Seconds = 30.0  # to finish requests in flight at shutdown
    management: bool = False  # serve /v1/adapters; anyone who reaches the router can then change adapters
    adapter_root: ConfigPath | None = None  # /v1/load_lora_adapter reads directories below it; None: it reads none
    upload_timeout_s: Seconds = 600.0  # per step: receive an upload, store it; prepare an export, send it


class ClusterConfig(_Section):
    """A whole cluster."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    workers: Annotated[dict[Name, WorkerConfig], Field(min_length=1)]
    adapter_limits: AdapterLimits = AdapterLimits()
    adapters: dict[str, AdapterConfig] = Field(default_factory=dict)
    catalog: CatalogConfig = CatalogConfig()
    store: StoreConfig = StoreConfig()
    residency: ResidencyConfig = ResidencyConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("adapters")
    @classmethod
    def _adapter_names(cls, adapters: dict[str, AdapterConfig]) -> dict[str, AdapterConfig]:
        from adapters.identity import check_adapter_name

        for name in adapters:
            check_adapter_name(name)
        return adapters

    @model_validator(mode="after")
    def _consistent(self) -> ClusterConfig:
        roles = [worker.role for worker in self.workers.values()]
        for role, peer in (("prefill", "decode"), ("decode", "prefill")):
            if role not in roles and peer in roles:
                raise ValueError(
                    f"workers: there is no {role} worker for the {peer} workers; "
                    "a cluster needs at least one of each, or unified workers only"
                )
        for name, worker in self.workers.items():
            try:
                self.engine_of(name)
            except ValueError as error:
                raise ValueError(f"workers.{name}.engine: {error}") from error
            if worker.role != "prefill" and worker.bootstrap_port:
                raise ValueError(f"workers.{name}.bootstrap_port: only prefill workers have one")
        from adapters.identity import check_not_base_model

        for name in self.adapters:
            try:
                check_not_base_model(name, self.model.name)
            except ValueError as error:
                raise ValueError(f"adapters.{name}: {error}") from error
        return self

    def engine_of(self, worker: str) -> EngineConfig:
        """The engine settings of one worker, its overrides applied."""
        return EngineConfig.model_validate({**self.engine.model_dump(), **self.workers[worker].engine})

    def workers_of(self, role: str) -> dict[str, WorkerConfig]:
        """The workers of one role, by name."""
        return {name: worker for name, worker in self.workers.items() if worker.role == role}

    def with_default_places(self, folder: Path) -> ClusterConfig:
        """With catalog, store and disk cache in `folder`, except those that the configuration names."""
        catalog = self.catalog.model_copy(update={"url": self.catalog.url or f"sqlite:///{folder / 'catalog.db'}"})
        store = self.store.model_copy(update={"url": self.store.url or f"file://{folder / 'store'}"})
        cache = self.residency.disk_directory or folder / "cache"
        residency = self.residency.model_copy(update={"disk_directory": cache})
        return self.model_copy(update={"catalog": catalog, "store": store, "residency": residency})
