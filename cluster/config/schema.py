"""The schema of `cluster.yaml`: one file that says what a cluster is. Read once, validated, passed down.

A field may be added with a default; it never changes its meaning. Durations end in `_s`.
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
Port = Annotated[int, Field(ge=0, le=65535)]  # 0: the supervisor picks a free one
Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """The one base model that the cluster serves."""

    path: ConfigPath  # a Hugging Face directory; relative paths start at cluster.yaml's folder
    name: Name  # the name that clients ask for
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class EngineConfig(_Section):
    """What every SGLang engine of the cluster is started with."""

    device: Literal["cpu", "cuda"] = "cpu"
    max_total_tokens: Annotated[int, Field(ge=64)] | None = None  # KV capacity; None: what fits
    max_running_requests: Annotated[int, Field(ge=1)] = 64
    chunked_prefill_tokens: Annotated[int, Field(ge=1)] = 2048
    context_length: Annotated[int, Field(ge=8)] | None = None  # None: the model's own
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    start_timeout_s: Seconds = 600.0
    extra_arguments: tuple[str, ...] = ()  # passed to SGLang after ours


class AdapterLimits(_Section):
    """What workers that hold adapters accept."""

    max_rank: Annotated[int, Field(ge=1, le=512)] = 64
    max_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3  # of one adapter's files
    slots: Annotated[int, Field(ge=1)] = 8  # distinct adapters in one prefill batch
    target_modules: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip


class AdapterConfig(_Section):
    """One adapter that the router imports when it starts: a directory in a layout of docs/adapter-formats.md."""

    path: ConfigPath


class CatalogConfig(_Section):
    """Which adapters there are: a database. Every router needs the same one."""

    url: str | None = None  # sqlite:////absolute/file or postgresql://…; None: .prelude/catalog.db beside cluster.yaml


class StoreConfig(_Section):
    """Where adapters' bytes are: a folder or a bucket. Every router and worker needs the same one.

    Keys of a bucket come from the environment, as for every AWS client.
    """

    url: str | None = None  # file:///folder or s3://bucket/prefix; None: .prelude/store beside cluster.yaml
    s3_endpoint_url: str | None = None  # None: AWS itself
    s3_region: str | None = None


class ResidencyConfig(_Section):
    """How many adapters a worker that holds adapters keeps close, and how it loads them."""

    disk_bytes: Annotated[int, Field(ge=0)] = 64 * 1024**3
    disk_directory: ConfigPath | None = None  # with a folder per worker; None: .prelude/cache beside cluster.yaml
    host_bytes: Annotated[int, Field(ge=1)] = 8 * 1024**3
    parallel_loads: Annotated[int, Field(ge=1)] = 8
    queued_loads: Annotated[int, Field(ge=1)] = 256
    lease_s: Seconds = 0.5  # after a request asked for it, a revision is not evicted: until it has reached the engine


class WorkerConfig(_Section):
    """One worker: an agent and the engine that it supervises. Ports of 0 are chosen at start."""

    role: Literal["prefill", "decode", "unified"]  # unified: both in one engine, without peers
    host: str = "127.0.0.1"
    control_port: Port = 0  # the agent's gRPC
    metrics_port: Port = 0  # the agent's HTTP: /metrics, /health, /ready
    engine_port: Port = 0  # SGLang's HTTP
    bootstrap_port: Port = 0  # prefill only: where decode engines ask for KV
    engine: dict[str, object] = Field(default_factory=dict)  # overrides of the cluster's `engine` section

    @property
    def holds_adapters(self) -> bool:
        return self.role != "decode"


class RouterConfig(_Section):
    """The HTTP front."""

    host: str = "127.0.0.1"
    port: Port = 8000
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024**2
    max_choices: Annotated[int, Field(ge=1)] = 128  # prompts x n of one request
    connect_timeout_s: Seconds = 5.0
    adapter_timeout_s: Seconds = 60.0  # for a cold adapter to become resident
    first_event_timeout_s: Seconds = 300.0  # queueing, prefill and KV transfer together
    event_gap_timeout_s: Seconds = 120.0  # between two events of a stream
    answer_timeout_s: Seconds = 1800.0  # a whole answer that is not streamed; on unified workers with its prefill
    body_timeout_s: Seconds = 60.0  # for a client to send its request
    heartbeat_s: Seconds = 2.0  # how often a worker speaks at least; three missed: it gets no requests
    max_attempts: Annotated[int, Field(ge=1)] = 3  # placements that one sequence is tried on
    drain_timeout_s: Seconds = 30.0
    management: bool = False  # offer /v1/adapters; whoever reaches the router can then change its adapters
    adapter_root: ConfigPath | None = None  # /v1/load_lora_adapter reads directories below it; None: it reads none
    upload_timeout_s: Seconds = 600.0  # to send an adapter, again to store it; to prepare an export, again to take it


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
        """With the catalog, the store and the disk cache in `folder` where the configuration names none."""
        catalog = self.catalog.model_copy(update={"url": self.catalog.url or f"sqlite:///{folder / 'catalog.db'}"})
        store = self.store.model_copy(update={"url": self.store.url or f"file://{folder / 'store'}"})
        cache = self.residency.disk_directory or folder / "cache"
        residency = self.residency.model_copy(update={"disk_directory": cache})
        return self.model_copy(update={"catalog": catalog, "store": store, "residency": residency})
