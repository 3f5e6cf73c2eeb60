"""The schema of `cluster.yaml`, which describes a cluster. Read once, validated, passed down.

New fields have defaults, and a field never changes its meaning. Names of durations end in `_s`, for seconds.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from cluster.config.discovery import DiscoveryConfig
from cluster.config.fields import MAX_NAME, ConfigPath, Name, Section, is_loopback
from cluster.config.router import RouterConfig
from cluster.config.workers import EngineConfig, WorkerConfig

_Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RoleChangeMode = Literal["off", "manual", "dry-run", "auto"]
CATALOG_VARIABLE = "PRELUDE_CATALOG_URL"  # a URL with a password comes from a secret rather than from a file


def _off(value: object) -> object:
    """The word that YAML reads as False where it has no quotes."""
    return "off" if value is False else value


def _check_trace_endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected the URL of a collector, such as http://127.0.0.1:4318")
    return value


def _check_trainer_url(value: str) -> str:
    parts = urlsplit(value)  # whose port may raise
    if value != f"{parts.scheme}://{parts.netloc}" or "@" in value or not (parts.hostname and parts.port):
        raise ValueError("expected scheme, host and port alone, such as http://127.0.0.1:8100")
    if parts.port == 65535:
        raise ValueError("expected a port below 65535: the next one has the trainer's metrics")
    return value


class ModelConfig(Section):
    """The one base model that the cluster serves."""

    path: ConfigPath  # Hugging Face directory; relative paths start at cluster.yaml's folder
    name: Name  # the base model's name in requests
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


class AdapterLimits(Section):
    """Limits on adapters, checked at import and by workers."""

    max_rank: Annotated[int, Field(ge=1, le=512)] = 64
    # Of LoRA on a mixture's experts. Every slot then has room for it on all experts, which can be gigabytes: 0
    # keeps that memory, and workers refuse such adapters.
    max_expert_rank: Annotated[int, Field(ge=0, le=512)] = 0
    max_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3  # of an adapter's files
    slots: Annotated[int, Field(ge=1)] = 8  # distinct adapters in one prefill batch
    target_modules: Annotated[tuple[_Projection, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip

    @model_validator(mode="after")
    def _experts_are_adapters_too(self) -> Self:
        if self.max_expert_rank > self.max_rank:
            raise ValueError(
                f"max_expert_rank is {self.max_expert_rank}, over max_rank with {self.max_rank}, which limits all of "
                "an adapter; raise max_rank"
            )
        return self


class AdapterConfig(Section):
    """An adapter that the router imports at start: a directory in one of the formats of docs/adapter-formats.md."""

    path: ConfigPath
    # Apply it to the prompt only, although its files do not say that it was trained for it (docs/positions.md).
    positions: Literal["prefill"] | None = None


class CatalogConfig(Section):
    """The database of adapters. All routers must use the same one."""

    # sqlite:////absolute/file or postgresql://…; None: PRELUDE_CATALOG_URL if set, else .prelude/catalog.db beside
    # cluster.yaml.
    url: Annotated[str, Field(min_length=1)] | None = None


class StoreConfig(Section):
    """The folder or bucket of adapters' files. All routers and workers must use the same one.

    Bucket credentials come from the environment, as for every AWS client, or from the profiles of its files that are
    named here. Workers only read (docs/security.md).
    """

    url: Annotated[str, Field(min_length=1)] | None = (
        None  # file:///folder or s3://bucket/prefix; None: .prelude/store beside cluster.yaml
    )
    s3_endpoint_url: str | None = None  # None: AWS
    s3_region: str | None = None
    s3_profile: str | None = None  # profile of routers and commands; None: the environment's
    s3_worker_profile: str | None = None  # profile of workers; None: the same as `s3_profile`


class IntegrityConfig(Section):
    """Signatures of adapters: imports sign, and workers load only what a trusted key has signed.

    A cluster whose workers are all on this machine generates its own keys.
    """

    signing_key: ConfigPath | None = None  # Ed25519 PEM, for routers and commands; None: PRELUDE_SIGNING_KEY
    trusted_keys: tuple[ConfigPath, ...] = ()  # public keys in PEM, for workers; two during a key change
    key_directory: ConfigPath | None = None  # of the generated pair; None: .prelude/signing beside cluster.yaml
    # Accept adapters without a trusted signature. None: never if pushed; from the store as docs/adapters.md says.
    accept_unverified: bool | None = None


def _parallel_loads() -> int:
    return min(max(8, len(os.sched_getaffinity(0))), 32)


class ResidencyConfig(Section):
    """How many adapters a worker caches in host memory and on disk, and how it loads them."""

    disk_bytes: Annotated[int, Field(ge=0)] = 64 * 1024**3  # size of the disk cache
    disk_directory: ConfigPath | None = None  # has a folder per worker; None: .prelude/cache beside cluster.yaml
    # Size of the cache in host memory, /dev/shm, which all workers of a host share. Default: half of /dev/shm, or a
    # quarter of the free memory if that is less, divided by the workers; at least 8 GiB, if /dev/shm has as much.
    host_bytes: Annotated[int, Field(ge=1)] = 8 * 1024**3
    # Concurrent loads. Default: the number of processor cores, at least 8 and at most 32.
    parallel_loads: Annotated[int, Field(ge=1)] = Field(default_factory=_parallel_loads)

    queued_loads: ClassVar[int] = 256  # loads that wait for a slot; more are refused with retry-after
    # No eviction for this long after a request ensured a revision; from then on, the engine counts it (decision 6).
    lease_s: ClassVar[float] = 0.1


class TlsConfig(Section):
    """Mutual TLS between the cluster's processes. Files are PEM, and are read again when they change.

    `{name}` in a path stands for the process: a worker's name, `router`, `trainer`, or `operator` for commands.
    `prelude certs` makes such files; docs/security.md says what others must contain.
    """

    ca: ConfigPath  # the authorities that processes trust
    certificate: ConfigPath
    key: ConfigPath


class TracingConfig(Section):
    """Traces of requests, sent to an OpenTelemetry collector (docs/tracing.md). Off without an endpoint.

    The variables of OpenTelemetry say the rest: headers, timeouts.
    """

    # URL of a collector's OTLP over HTTP, such as http://127.0.0.1:4318.
    endpoint: Annotated[str, AfterValidator(_check_trace_endpoint)] | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # share of traced requests, of those without a traceparent
    continue_client_traces: bool = True  # a client's traceparent decides trace id and sampling


class TrainerConfig(Section):
    """The training service: the router passes /api/v1 on to it (docs/training-service.md)."""

    # http://HOST:PORT, or https://HOST:PORT with `tls`. The next port has its metrics, in plain text.
    url: Annotated[str, AfterValidator(_check_trainer_url)]
    # The model's name for its clients, such as Qwen/Qwen3-8B, by which they find its tokenizer. None: model.name
    model_name: str | None = None
    # Of its log, checkpoints and snapshots. None: .prelude/trainer beside cluster.yaml.
    folder: ConfigPath | None = None
    # The file of the secret by which it knows the router; made where it is missing. None: .prelude/trainer.key
    key: ConfigPath | None = None


class ClusterConfig(Section):
    """A whole cluster."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    workers: dict[Name, WorkerConfig] = Field(default_factory=dict)  # may be empty if `discovery` finds some
    discovery: DiscoveryConfig = DiscoveryConfig()
    # Prefill and decode workers can become each other without a restart (docs/workers.md): when somebody asks (manual),
    # or as the load wants it (auto). Their engines all have slots for adapters. A dry-run changes nothing: routers only
    # say what they would do, and how many workers of each role the load wants.
    role_changes: Annotated[RoleChangeMode, BeforeValidator(_off)] = "off"
    tls: TlsConfig | None = None  # None: control and engine traffic is plain text
    adapter_limits: AdapterLimits = AdapterLimits()
    adapters: dict[str, AdapterConfig] = Field(default_factory=dict)
    catalog: CatalogConfig = CatalogConfig()
    store: StoreConfig = StoreConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    residency: ResidencyConfig = ResidencyConfig()
    tracing: TracingConfig = TracingConfig()
    trainer: TrainerConfig | None = None  # None: nothing is trained here
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("adapters")
    @classmethod
    def _adapter_names(cls, adapters: dict[str, AdapterConfig]) -> dict[str, AdapterConfig]:
        from adapters.identity import split_adapter_name

        for name in adapters:
            split_adapter_name(name)
        return adapters

    @field_validator("workers")
    @classmethod
    def _replicas_as_workers(cls, workers: dict[str, WorkerConfig], info: ValidationInfo) -> dict[str, WorkerConfig]:
        """Put X-0, X-1, … in the place of a worker X with replicas, so that every reader sees the same workers."""
        engine = info.data.get("engine")
        if engine is None:  # it is invalid, which is reported separately
            return workers
        found: dict[str, WorkerConfig] = {}
        for name, worker in workers.items():
            try:
                worker = worker.with_resolved_gpus(engine)
                replicas = {f"{name}-{number}": worker.replica(number) for number in range(worker.replicas)}
            except ValueError as error:
                raise ValueError(f"workers.{name}.{error}") from error
            if worker.replicas == 1:
                replicas = {name: worker}
            for each in replicas:
                if len(each) > MAX_NAME:
                    raise ValueError(f"workers.{name}.replicas: the name {each} is over {MAX_NAME} characters")
                if each in found or (each != name and each in workers):
                    raise ValueError(f"workers.{name}.replicas: there is another worker called {each}; rename one")
            found |= replicas
        if len(found) > len(workers):
            _check_ports_differ(found)
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        roles = {worker.role for worker in self.workers.values()} | self.discovery.by_role.keys()
        if not roles:
            raise ValueError("workers: give at least one, or `discovery` to find them")
        for role, peer in (("prefill", "decode"), ("decode", "prefill")):
            if role not in roles and peer in roles:
                raise ValueError(
                    f"workers: there is no {role} worker for the {peer} workers; "
                    "a cluster needs at least one of each, or unified workers only"
                )
        self._check_pages_agree()
        for name, worker in self.workers.items():
            is_trainer = name == "trainer" and self.trainer is not None
            if name == "router" or is_trainer or (self.tls is not None and name in ("operator", "trainer", "ca")):
                raise ValueError(f"workers.{name}: that name is another process's certificate or folder; rename it")
            if not self.may_be(worker.role, "prefill") and worker.bootstrap_port:
                raise ValueError(f"workers.{name}.bootstrap_port: only prefill workers have one")
        from adapters.identity import check_not_base_model

        for name in self.adapters:
            try:
                check_not_base_model(name, self.model.name)
            except ValueError as error:
                raise ValueError(f"adapters.{name}: {error}") from error
        return self

    def _check_pages_agree(self) -> None:
        """A decode engine of SGLang would end at the first transfer from an engine with different pages."""
        found = {f"discovery.{role}": self._template(role, "localhost") for role in self.discovery.by_role}
        for name, worker in found.items():
            try:
                worker.with_resolved_gpus(self.engine)
            except ValueError as error:
                raise ValueError(f"{name}.worker.{error}") from error
        pages = {
            name: worker.engine_in(self.engine).kv_page_tokens_of(worker.role)
            for name, worker in (found | self.workers).items()
            if worker.role in ("prefill", "decode")
        }
        if len(set(pages.values())) > 1:
            given = ", ".join(f"{name} {tokens}" for name, tokens in pages.items())
            raise ValueError(
                f"workers: prefill and decode workers exchange pages of KV, but their kv_page_tokens differ ({given}); "
                "set it in `engine` for all of them"
            )

    def with_found_worker(self, name: str, role: str, host: str) -> Self:
        """The configuration plus a worker that `workers` does not list, with `discovery`'s settings for its role.

        Raises ValueError.
        """
        worker = self._template(role, host)
        return self.model_copy(update={"workers": {**self.workers, name: worker.with_resolved_gpus(self.engine)}})

    def _template(self, role: str, host: str) -> WorkerConfig:
        """A worker that is discovered in this role."""
        found = self.discovery.by_role[role]
        given = found.worker.model_dump(exclude_unset=True)
        return WorkerConfig.model_validate({**given, "role": role, "host": host, "control_port": found.control_port})

    def engine_of(self, worker: str) -> EngineConfig:
        """The engine settings of one worker, its overrides applied; the cluster's, if it is not among `workers`."""
        return self.workers[worker].engine_in(self.engine) if worker in self.workers else self.engine

    def drain_timeout_of(self, worker: str) -> float:
        """Seconds that a worker has to finish requests in flight before it stops.

        For a worker that is not among `workers`: the longest of the router's time and those of discovered roles.
        """
        if worker in self.workers:
            return self.workers[worker].drain_timeout_s or self.router.drain_timeout_s
        found = [role.worker.drain_timeout_s or 0.0 for role in self.discovery.by_role.values()]
        return max([self.router.drain_timeout_s, *found])

    def workers_of(self, role: str) -> dict[str, WorkerConfig]:
        """The workers of one role, by name."""
        return {name: worker for name, worker in self.workers.items() if worker.role == role}

    @property
    def roles_may_change(self) -> bool:
        """Whether prefill and decode workers may become each other."""
        return self.role_changes in ("manual", "auto")

    def may_be(self, role: str, *roles: str) -> bool:
        """Whether a worker that begins in a role has one of `roles`, or may change to it."""
        may_change = self.roles_may_change and role != "unified"
        return role in roles or (may_change and not {"prefill", "decode"}.isdisjoint(roles))

    def with_default_places(self, folder: Path) -> Self:
        """The configuration with catalog, store, disk cache and keys in `folder`, unless it names other places."""
        url = self.catalog.url or os.environ.get(CATALOG_VARIABLE) or f"sqlite:///{folder / 'catalog.db'}"
        catalog = self.catalog.model_copy(update={"url": url})
        store = self.store.model_copy(update={"url": self.store.url or f"file://{folder / 'store'}"})
        cache = self.residency.disk_directory or folder / "cache"
        residency = self.residency.model_copy(update={"disk_directory": cache})
        integrity = self.integrity
        has_keys = integrity.signing_key or integrity.trusted_keys or integrity.key_directory
        # A cluster that only discovers its workers is not on one machine: routers would each make keys of their own.
        is_here = bool(self.workers) and all(is_loopback(worker.host) for worker in self.workers.values())
        if not has_keys and is_here:
            integrity = integrity.model_copy(update={"key_directory": folder / "signing"})
        trainer = self.trainer
        if trainer is not None:
            key, trained = trainer.key or folder / "trainer.key", trainer.folder or folder / "trainer"
            trainer = trainer.model_copy(update={"key": key, "folder": trained})
        sections = {"catalog": catalog, "store": store, "residency": residency, "integrity": integrity}
        return self.model_copy(update={**sections, "trainer": trainer})


def _check_ports_differ(workers: dict[str, WorkerConfig]) -> None:
    """Raise ValueError if two workers get the same port, for example by replicas' ports that count up."""
    taken: dict[tuple[str, int], str] = {}
    for name, worker in workers.items():
        for field in ("control_port", "metrics_port", "engine_port", "bootstrap_port"):
            place = f"workers.{name}.{field}"
            if port := getattr(worker, field):
                if other := taken.get((worker.host, port)):
                    raise ValueError(f"{place} is {port}, and so is {other}; ports of replicas count up")
                taken[worker.host, port] = place
