"""The schema of `cluster.yaml`, which describes a cluster. Read once, validated, passed down.

New fields have defaults, and a field never changes its meaning. Names of durations end in `_s`, for seconds.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from adapters.identity import DEFAULT_TENANT
from adapters.scopes import Scope, parse_scope
from cluster.config.limits import RequestLimits
from cluster.config.quotas import QuotasConfig
from process.tracing.settings import OtlpProtocol


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server at this address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


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
CATALOG_VARIABLE = "PRELUDE_CATALOG_URL"  # a URL with a password comes from a secret rather than from a file
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
_LAST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=_LAST_PORT)]  # 0: `prelude up` picks a free port
Seconds = Annotated[float, Field(gt=0)]


def _check_gpus(value: Any) -> Any:
    def is_gpu(each: Any) -> bool:
        is_index = isinstance(each, int) and not isinstance(each, bool) and each >= 0
        return is_index or (isinstance(each, str) and each.startswith("GPU-"))

    if isinstance(value, (list, tuple)):
        if not value or not all(is_gpu(each) for each in value) or len(set(value)) < len(value):
            raise ValueError(
                "expected different GPUs, each by its index or UUID as nvidia-smi shows them, such as [0, 1]; "
                f"found {value!r}"
            )
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected a number of GPUs, such as 2, or a list of them, such as [0, 1]; found {value!r}")
    return value


def _check_dns_name(name: str) -> str:
    labels = name.removesuffix(".").split(".")
    if len(name) > 253 or not all(
        re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?", each) for each in labels
    ):
        raise ValueError("expected a DNS name, such as prefill.prelude.svc.cluster.local")
    return name


def split_nameserver(text: str) -> tuple[str, int]:
    """The IP address and the port, 53 unless it is given. Raises ValueError."""
    host, port = text, "53"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or "53"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    ip_address(host)
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{port} is no port")
    return host, int(port)


def _check_nameserver(text: str) -> str:
    try:
        split_nameserver(text)
    except ValueError as error:
        raise ValueError(f"expected an IP address, or one with a port, such as 10.0.0.10:53 ({error})") from error
    return text


Gpus = Annotated[int | tuple[int | str, ...], BeforeValidator(_check_gpus)]
_MAX_NAME = 63  # characters of a Name


def check_trace_endpoint(value: str) -> str:
    """The URL of a collector, unchanged. Raises ValueError."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected the URL of a collector, such as http://127.0.0.1:4318")
    return value


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
    tensor_parallel: Annotated[int, Field(ge=1)] = 1  # GPUs of one engine, among which it divides the model
    start_timeout_s: Seconds = 600.0
    # Who may reach the ports over which KV transfers are arranged: names, addresses or networks such as 10.2.0.0/16.
    # None: the hosts of the peers. Needed where peers call from other addresses than their `host`.
    kv_peers: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/-]{1,253}$")], ...] | None = None
    # A part of the engine that shows no sign of life for so long: no requests, and a restart after twice or four times
    # that (docs/workers.md). None: nothing looks for hangs.
    hang_timeout_s: Annotated[float, Field(ge=1)] | None = 10.0
    batch_timeout_s: Annotated[float, Field(ge=1)] = 300.0  # a scheduler that computes one batch for so long hangs, too
    extra_arguments: tuple[str, ...] = ()  # appended to SGLang's command line; a worker's replace the cluster's
    more_arguments: tuple[str, ...] = ()  # appended after them; a worker's are added to the cluster's


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

    # sqlite:////absolute/file or postgresql://…; None: as in PRELUDE_CATALOG_URL, else .prelude/catalog.db beside
    # cluster.yaml.
    url: str | None = None


class StoreConfig(_Section):
    """The folder or bucket of adapters' files. All routers and workers must use the same one.

    Bucket credentials come from the environment, as for every AWS client, or from the profiles of its files that are
    named here. Workers only read (docs/security.md).
    """

    url: str | None = None  # file:///folder or s3://bucket/prefix; None: .prelude/store beside cluster.yaml
    s3_endpoint_url: str | None = None  # None: AWS
    s3_region: str | None = None
    s3_profile: str | None = None  # of routers and commands; None: the environment's credentials
    s3_worker_profile: str | None = None  # of workers; None: as `s3_profile`


class AuditConfig(_Section):
    """The append-only log of changes and denials."""

    file: ConfigPath | None = None  # of JSON lines, on each router's machine; None: in the catalog's database


class IntegrityConfig(_Section):
    """Signatures of adapters: who imports signs, and workers load what a key that they trust has signed.

    A cluster whose workers are all on this machine makes keys for itself.
    """

    signing_key: ConfigPath | None = None  # Ed25519 in PEM, of routers and commands; None: as in PRELUDE_SIGNING_KEY
    trusted_keys: tuple[ConfigPath, ...] = ()  # public ones in PEM, of workers; two while a key is replaced
    key_directory: ConfigPath | None = None  # of the pair that is made; None: .prelude/signing beside cluster.yaml
    # Take adapters without such a signature. None: not those that routers push; and from the store only where it is
    # not the one beside the keys, which others may use, or is older than they are.
    accept_unverified: bool | None = None


def _parallel_loads() -> int:
    return min(max(8, len(os.sched_getaffinity(0))), 32)


class ResidencyConfig(_Section):
    """How many adapters a worker caches in host memory and on disk, and how it loads them."""

    disk_bytes: Annotated[int, Field(ge=0)] = 64 * 1024**3  # size of the disk cache
    disk_directory: ConfigPath | None = None  # has a folder per worker; None: .prelude/cache beside cluster.yaml
    # Size of the cache in host memory: /dev/shm, in which all workers of a host must fit. Not given: 8 GiB, or less
    # where there is less.
    host_bytes: Annotated[int, Field(ge=1)] = 8 * 1024**3
    # Concurrent loads. Not given: as many as this machine has processor cores, at least 8 and at most 32.
    parallel_loads: Annotated[int, Field(ge=1)] = Field(default_factory=_parallel_loads)
    queued_loads: Annotated[int, Field(ge=1)] = 256  # loads waiting for them; more are refused with a retry-after
    lease_s: Seconds = 0.1  # no eviction for this long after a request ensured a revision, until the engine counts it


class WorkerConfig(_Section):
    """One worker: an agent and the engine that it supervises. A port of 0 is chosen at start."""

    role: Literal["prefill", "decode", "unified"]  # unified: prefill and decode in one engine
    host: str = "127.0.0.1"
    # Where the engine listens, with SGLang's KV bootstrap; None: `host`. 127.0.0.1 if the router and, for a pair, the
    # peers are on this host.
    engine_host: str | None = None
    control_port: Port = 0  # the agent's gRPC
    metrics_port: Port = 0  # the agent's HTTP: /metrics, /health, /ready
    engine_port: Port = 0  # SGLang's HTTP
    bootstrap_port: Port = 0  # prefill only: where decode engines request KV
    # Equal workers X-0, X-1, … instead of one X. Ports that are given count up from X-0's.
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    # The engine's GPUs: by index or UUID (those of all replicas, in order), or so many of those that
    # are free (for each replica). None: as many as tensor_parallel if any worker has `gpus`, else the first ones.
    gpus: Gpus | None = None
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None  # None: the engine's; if that is not set, one per GPU
    domain: str = ""  # of NVLink or RDMA: the router prefers pairs of one domain; empty: unknown
    drain_timeout_s: Seconds | None = None  # to finish requests in flight before it stops; None: router.drain_timeout_s
    engine: dict[str, object] = Field(default_factory=dict)  # overrides of the cluster's `engine` section

    @property
    def holds_adapters(self) -> bool:
        return self.role != "decode"

    def with_resolved_gpus(self, cluster_engine: EngineConfig) -> WorkerConfig:
        """With the tensor parallel size that its GPUs imply, and GPUs for its replicas. Raises ValueError."""
        engine, own = self.engine_in(cluster_engine), self.tensor_parallel
        override = self.engine.get("tensor_parallel")
        if own is not None and override is not None and str(own) != str(override):
            raise ValueError(f"tensor_parallel is {own}, but engine.tensor_parallel is {override}; keep one")
        if self.gpus is None:
            takes_gpus = self.replicas > 1 and engine.device == "cuda"
            return self.model_copy(update={"gpus": engine.tensor_parallel}) if takes_gpus else self
        if engine.device == "cpu":
            raise ValueError("gpus: its engine has `device: cpu`; set `device: cuda`, or leave `gpus` out")
        if "--base-gpu-id" in (*engine.extra_arguments, *engine.more_arguments):
            raise ValueError("gpus: its engine also has the argument --base-gpu-id, which names GPUs too; keep one")
        given = len(self.gpus) if isinstance(self.gpus, tuple) else self.gpus * self.replicas
        count, rest = divmod(given, self.replicas)
        is_set = own is not None or override is not None or "tensor_parallel" in cluster_engine.model_fields_set
        size = engine.tensor_parallel if is_set else count
        if rest or count != size:
            raise ValueError(
                f"gpus: it gives {given} GPUs, but replicas x tensor_parallel is {self.replicas} x {size} = "
                f"{self.replicas * size}; change one of them"
            )
        return self.model_copy(update={"tensor_parallel": size})

    def engine_in(self, cluster_engine: EngineConfig) -> EngineConfig:
        """The worker's engine settings: the cluster's, with its own on top. Raises ValueError."""
        own = dict(self.engine)
        if self.tensor_parallel is not None:
            own["tensor_parallel"] = self.tensor_parallel
        engine = EngineConfig.model_validate({**cluster_engine.model_dump(), **own})
        if "more_arguments" not in own:
            return engine
        return engine.model_copy(update={"more_arguments": cluster_engine.more_arguments + engine.more_arguments})

    def replica(self, number: int) -> WorkerConfig:
        """One of its replicas. Raises ValueError if there is no such port."""
        given: dict[str, Any] = {}
        for field in ("control_port", "metrics_port", "engine_port", "bootstrap_port"):
            if port := getattr(self, field):
                if port + number > _LAST_PORT:
                    raise ValueError(
                        f"{field}: replica {number} would have {port + number}, and the last port is {_LAST_PORT}"
                    )
                given[field] = port + number
        if isinstance(self.gpus, tuple):
            count = len(self.gpus) // self.replicas
            given["gpus"] = self.gpus[number * count : (number + 1) * count]
        return self.model_copy(update={**given, "replicas": 1})


class TlsConfig(_Section):
    """Mutual TLS between the cluster's processes. Files are PEM, and are read again when they change.

    `{name}` in a path stands for the process: a worker's name, `router`, or `operator` for the command line.
    `prelude certs` makes such files; docs/security.md says what others must contain.
    """

    ca: ConfigPath  # the authorities that processes believe
    certificate: ConfigPath
    key: ConfigPath


class ClientTlsConfig(_Section):
    """TLS for clients of the router. Files are PEM, and are read again when they change."""

    certificate: ConfigPath  # with the chain that leads to its authority
    key: ConfigPath


class ScorerWeights(_Section):
    """Weights of what placement adds up, each in expected seconds to the first token. 0 switches a scorer off."""

    queue: Annotated[float, Field(ge=0)] = 1.0  # prompts to be read before this one
    residency: Annotated[float, Field(ge=0)] = 1.0  # a cold load
    home: Annotated[float, Field(ge=0)] = 1.0  # leaving the adapter's homes, crowding one, a copy too many
    prefix: Annotated[float, Field(ge=0)] = 1.0  # the part of the prompt that is in the prefix cache
    room: Annotated[float, Field(ge=0)] = 1.0  # KV memory that a unified worker lacks
    in_flight: Annotated[float, Field(ge=0)] = 0.0  # sequences in flight, a second each; for comparisons


class PlacementConfig(_Section):
    """How the router chooses workers."""

    weights: ScorerWeights = ScorerWeights()
    load_bound: Annotated[float, Field(ge=1)] = 1.25  # a home is full at this multiple of the workers' mean queue
    slack_prompts: Annotated[float, Field(ge=0)] = 2.0  # and so many prompts more
    max_homes: Annotated[int, Field(ge=1, le=16)] = 8  # of one adapter
    home_share: Annotated[float, Field(gt=0, le=1)] = 0.25  # of a worker's time for one adapter, before it gets a home


class OidcConfig(_Section):
    """An issuer whose JSON Web Tokens the router takes in place of API keys."""

    issuer: str  # its URL, as in the tokens' `iss`; https, except on this machine
    audience: Annotated[str, Field(min_length=1)]  # what the tokens' `aud` must have
    jwks_url: str | None = None  # of its public keys; None: as its /.well-known/openid-configuration says
    tenant_claim: Annotated[str, Field(min_length=1)] = "tenant"  # the claim with the tenant's name; "a.b": nested
    scope_claim: Annotated[str, Field(min_length=1)] = "scope"  # a list, or words in one string
    # What values of the scope claim permit. None: those that are scopes, as they are.
    scopes: dict[str, tuple[Scope, ...]] | None = None
    refresh_s: Seconds = 300.0  # between two reads of the public keys

    @field_validator("issuer", "jwks_url")
    @classmethod
    def _is_encrypted(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "https://none")
        if not parts.hostname or parts.scheme not in ("https", "http"):
            raise ValueError("expected a URL that begins with https://")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError("whoever is between the router and the issuer could forge tokens; use https://")
        return url

    @field_validator("scopes", mode="before")
    @classmethod
    def _known_scopes(cls, scopes: Any) -> Any:
        for value, granted in scopes.items() if isinstance(scopes, dict) else ():
            for each in granted if isinstance(granted, (list, tuple)) else ():
                try:
                    parse_scope(each)
                except ValueError as error:
                    raise ValueError(f"{value}: {error}") from error
        return scopes


class AuthConfig(_Section):
    """Who may use the router."""

    keys: bool = True  # API keys of the catalog: `prelude keys create`
    oidc: tuple[OidcConfig, ...] = ()  # issuers of tokens


class AdminConfig(_Section):
    """The router's admin listener: /metrics, /debug/…, and /ready in detail. It asks for no key: keep it private."""

    host: str = "127.0.0.1"
    port: Port | None = None  # None: the one after router.port; `prelude up` takes another one if that is in use


class HttpConfig(_Section):
    """Limits of the router's HTTP server, for each of its processes. They hold for the admin listener, too."""

    max_connections: Annotated[int, Field(ge=1)] = 10_000
    max_connections_per_address: Annotated[int, Field(ge=1)] = 4096
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024  # of a request, its first line included
    max_headers: Annotated[int, Field(ge=8)] = 128  # of a request
    max_target_bytes: Annotated[int, Field(ge=256)] = 8 * 1024  # path and query
    max_pipelined: Annotated[int, Field(ge=1)] = 16  # requests that wait for the one before on their connection
    header_timeout_s: Seconds = 20.0  # from a request's first byte, or a new connection, to the end of its headers
    body_gap_timeout_s: Seconds = 30.0  # without any of a request's body
    idle_timeout_s: Seconds = 75.0  # of a connection, between requests


class SloConfig(_Section):
    """What an answer has to keep to count as good in the metrics. It changes no answer.

    A stream has both times; an answer in one piece may take as long as a stream with an event per token.
    """

    first_token_s: Seconds = 2.0  # from a request's head to its first event
    event_gap_s: Seconds = 0.1  # mean time between its events after that: tokens, or several at once


class RouterConfig(_Section):
    """The router: its HTTP server, its timeouts and retries."""

    host: str = "127.0.0.1"
    port: Port = 8000
    auth: AuthConfig | None = None  # None: no authentication, on this machine only
    # Serve beyond this machine without authentication, and let the router and the workers use plain text there.
    insecure: bool = False
    share_base_prefixes: bool = False  # one prefix cache for the base model's prompts of all tenants
    tls: ClientTlsConfig | None = None  # None: plain HTTP
    admin: AdminConfig = AdminConfig()
    http: HttpConfig = HttpConfig()
    processes: Annotated[int, Field(ge=1, le=64)] = 1  # that share the port, each with its own view of the workers
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024**2
    max_choices: Annotated[int, Field(ge=1)] = 128  # sequences of one request: prompts x n
    limits: RequestLimits = RequestLimits()  # cluster/config/limits.py documents them
    quotas: QuotasConfig | None = None  # of tenants: cluster/config/quotas.py; None: no tenant has any
    connect_timeout_s: Seconds = 5.0
    adapter_timeout_s: Seconds = 60.0  # to load a cold adapter
    first_event_timeout_s: Seconds = 300.0  # queueing, prefill and KV transfer
    # A request that waits for its first event, or its answer, at workers that report no progress is tried elsewhere.
    progress_timeout_s: Seconds = 60.0
    event_gap_timeout_s: Seconds = 120.0  # between two events of a stream
    answer_timeout_s: Seconds = 1800.0  # a complete answer without streaming; on unified workers including prefill
    body_timeout_s: Seconds = 60.0  # to receive a client's request
    heartbeat_s: Annotated[float, Field(ge=0.05, le=3600)] = (
        2.0  # longest gap in a worker's state stream; a worker that misses three gets no requests
    )
    max_attempts: Annotated[int, Field(ge=1)] = 3  # placements tried per sequence
    placement: PlacementConfig = PlacementConfig()
    debug_header: bool = False  # answer `x-prelude-debug: placement` with why the request went where it went
    slo: SloConfig = SloConfig()
    drain_timeout_s: Seconds = 30.0  # to finish requests in flight at shutdown
    management: bool = False  # serve /v1/adapters; anyone who reaches the router can then change adapters
    adapter_root: ConfigPath | None = None  # /v1/load_lora_adapter reads directories below it; None: it reads none
    upload_timeout_s: Seconds = 600.0  # per step: receive an upload, store it; prepare an export, send it

    @field_validator("quotas")
    @classmethod
    def _quotas_are_of_somebody(cls, quotas: QuotasConfig | None, info: ValidationInfo) -> QuotasConfig | None:
        named = [] if quotas is None else sorted(quotas.tenants.keys() - {DEFAULT_TENANT})
        if named and info.data.get("auth", AuthConfig()) is None:
            raise ValueError(
                f"quotas.tenants.{named[0]}: without `auth` everybody is the tenant {DEFAULT_TENANT!r}; set "
                "`auth: {}`, or give the limits under `quotas.default`"
            )
        return quotas

    @property
    def admin_port(self) -> int:
        """The admin listener's port; 0: any free one."""
        if self.admin.port is not None:
            return self.admin.port
        return self.port + 1 if 0 < self.port < _LAST_PORT else 0


class TracingConfig(_Section):
    """Traces of requests, sent to an OpenTelemetry collector (docs/tracing.md). Off without an endpoint."""

    # URL of a collector, such as http://127.0.0.1:4318; None: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
    # OTEL_EXPORTER_OTLP_ENDPOINT, if one is set.
    endpoint: Annotated[str, AfterValidator(check_trace_endpoint)] | None = None
    protocol: OtlpProtocol | None = None  # None: OTEL_EXPORTER_OTLP_(TRACES_)PROTOCOL, else http/protobuf
    # Share of the requests that come without a traceparent; None: as OTEL_TRACES_SAMPLER says, else all.
    sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    continue_client_traces: bool = True  # a client's traceparent says which trace, and whether it is sampled
    engine_level: Annotated[int, Field(ge=0, le=4)] = 2  # SGLang's detail; 3: a span per decoded token; 0: no spans


class FoundWorkerConfig(_Section):
    """What the workers of one role that are not among `workers` have in common. For their own processes.

    `prelude prefill-worker --name NAME --host HOST` and the like take them. The fields are those of `WorkerConfig`.
    """

    metrics_port: Port = 0
    engine_port: Port = 0
    bootstrap_port: Port = 0  # prefill only
    gpus: Gpus | None = None
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None
    domain: str = ""
    drain_timeout_s: Seconds | None = None
    engine: dict[str, object] = Field(default_factory=dict)


_KUBERNETES_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class KubernetesDiscovery(_Section):
    """Workers that the Kubernetes API server lists: those behind a Service, or Pods by their labels."""

    service: Annotated[str, StringConstraints(pattern=_KUBERNETES_NAME)] | None = None  # its EndpointSlices are read
    pods: Annotated[str, StringConstraints(pattern=r"^[!-~][ -~]{0,1023}$")] | None = (
        None  # label selector: app=prelude
    )
    namespace: Annotated[str, StringConstraints(pattern=_KUBERNETES_NAME)] | None = None  # None: this process's own
    port_name: Annotated[str, StringConstraints(pattern=_KUBERNETES_NAME)] = "control"  # if `control_port` is not given

    @model_validator(mode="after")
    def _has_one_kind(self) -> KubernetesDiscovery:
        if (self.service is None) is (self.pods is None):
            raise ValueError("give `service`, the name of a Service, or `pods`, a label selector")
        return self


class RoleDiscovery(_Section):
    """Where workers of one role are found: by `dns` or by `kubernetes`."""

    # Its A and AAAA records, or its SRV records if it starts with an underscore: _control._tcp.prefill.example.org
    dns: Annotated[str, AfterValidator(_check_dns_name)] | None = None
    kubernetes: KubernetesDiscovery | None = None
    # Of their agents. SRV records have it; Kubernetes has it by `port_name`.
    control_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    worker: FoundWorkerConfig = FoundWorkerConfig()

    @model_validator(mode="after")
    def _has_one_source(self) -> RoleDiscovery:
        if (self.dns is None) is (self.kubernetes is None):
            raise ValueError("give `dns`, a name, or `kubernetes`, a Service or Pods")
        return self

    @model_validator(mode="after")
    def _has_one_port(self) -> RoleDiscovery:
        if self.is_srv and self.control_port is not None:
            raise ValueError("control_port: the SRV records of `dns` have the port; leave it out")
        if self.dns is not None and not self.is_srv and self.control_port is None:
            raise ValueError(
                "control_port: A and AAAA records have no port; give that of the workers' agents, or the name of SRV "
                "records, such as _control._tcp.prefill.example.org"
            )
        return self

    @property
    def is_srv(self) -> bool:
        return self.dns is not None and self.dns.startswith("_")


class DiscoveryConfig(_Section):
    """Sources of workers that come and go while the cluster runs, beside those in `workers`."""

    prefill: RoleDiscovery | None = None
    decode: RoleDiscovery | None = None
    unified: RoleDiscovery | None = None
    interval_s: Annotated[float, Field(ge=0.05, le=3600)] = 5.0  # between two lookups by DNS, give or take a fifth
    nameservers: tuple[Annotated[str, AfterValidator(_check_nameserver)], ...] = ()  # IP or IP:port; (): the machine's
    kubeconfig: ConfigPath | None = None  # how to reach the API server; None: as a Pod does, by its service account
    max_workers: Annotated[int, Field(ge=1, le=4096)] = 1024  # found; more are ignored
    forget_after_s: Seconds = 60.0  # a found worker that is silent for so long is no longer listed

    @property
    def by_role(self) -> dict[str, RoleDiscovery]:
        """The roles of which workers are found."""
        found = {"prefill": self.prefill, "decode": self.decode, "unified": self.unified}
        return {role: discovery for role, discovery in found.items() if discovery is not None}


class ClusterConfig(_Section):
    """A whole cluster."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    workers: dict[Name, WorkerConfig] = Field(default_factory=dict)  # may be empty if `discovery` finds some
    discovery: DiscoveryConfig = DiscoveryConfig()
    tls: TlsConfig | None = None  # None: control and engine traffic is plain text
    adapter_limits: AdapterLimits = AdapterLimits()
    adapters: dict[str, AdapterConfig] = Field(default_factory=dict)
    catalog: CatalogConfig = CatalogConfig()
    audit: AuditConfig = AuditConfig()
    store: StoreConfig = StoreConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    residency: ResidencyConfig = ResidencyConfig()
    tracing: TracingConfig = TracingConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("adapters")
    @classmethod
    def _adapter_names(cls, adapters: dict[str, AdapterConfig]) -> dict[str, AdapterConfig]:
        from adapters.identity import check_adapter_name

        for name in adapters:
            check_adapter_name(name)
        return adapters

    @field_validator("workers")
    @classmethod
    def _replicas_as_workers(cls, workers: dict[str, WorkerConfig], info: ValidationInfo) -> dict[str, WorkerConfig]:
        """Put X-0, X-1, … in the place of a worker X with replicas, so that every reader sees the same workers."""
        engine = info.data.get("engine")
        if engine is None:  # it is invalid, which has an error of its own
            return workers
        found: dict[str, WorkerConfig] = {}
        for name, worker in workers.items():
            try:
                worker = worker.with_resolved_gpus(engine)
                replicas = {f"{name}-{number}": worker.replica(number) for number in range(worker.replicas)}
            except ValidationError as error:
                raise ValueError(f"workers.{name}.engine: {error}") from error
            except ValueError as error:
                raise ValueError(f"workers.{name}.{error}") from error
            if worker.replicas == 1:
                replicas = {name: worker}
            for each in replicas:
                if len(each) > _MAX_NAME:
                    raise ValueError(f"workers.{name}.replicas: the name {each} is over {_MAX_NAME} characters")
                if each in found or (each != name and each in workers):
                    raise ValueError(f"workers.{name}.replicas: there is another worker called {each}; rename one")
            found |= replicas
        if len(found) > len(workers):
            _check_ports_differ(found)
        return found

    @model_validator(mode="after")
    def _consistent(self) -> ClusterConfig:
        roles = {worker.role for worker in self.workers.values()} | self.discovery.by_role.keys()
        if not roles:
            raise ValueError("workers: give at least one, or `discovery` to find them")
        for role, peer in (("prefill", "decode"), ("decode", "prefill")):
            if role not in roles and peer in roles:
                raise ValueError(
                    f"workers: there is no {role} worker for the {peer} workers; "
                    "a cluster needs at least one of each, or unified workers only"
                )
        for name, worker in self.workers.items():
            if self.tls is not None and name in ("router", "operator", "ca"):
                raise ValueError(f"workers.{name}: with `tls` that name is another process's certificate; rename it")
            if worker.role != "prefill" and worker.bootstrap_port:
                raise ValueError(f"workers.{name}.bootstrap_port: only prefill workers have one")
        from adapters.identity import check_not_base_model

        for name in self.adapters:
            try:
                check_not_base_model(name, self.model.name)
            except ValueError as error:
                raise ValueError(f"adapters.{name}: {error}") from error
        return self

    def with_found_worker(self, name: str, role: str, host: str, control_port: int) -> ClusterConfig:
        """With a worker that `workers` does not list, as `discovery` describes those of its role. Raises ValueError."""
        template = self.discovery.by_role[role].worker
        fields = template.model_dump(exclude_unset=True)
        worker = WorkerConfig.model_validate({**fields, "role": role, "host": host, "control_port": control_port})
        return self.model_copy(update={"workers": {**self.workers, name: worker.with_resolved_gpus(self.engine)}})

    def engine_of(self, worker: str) -> EngineConfig:
        """The engine settings of one worker, its overrides applied."""
        return self.workers[worker].engine_in(self.engine)

    def drain_timeout_of(self, worker: str) -> float:
        """Seconds that a worker has to finish requests in flight before it stops.

        For one that is not among `workers`: the longest that one of its kind may have.
        """
        if worker in self.workers:
            return self.workers[worker].drain_timeout_s or self.router.drain_timeout_s
        found = [role.worker.drain_timeout_s or 0.0 for role in self.discovery.by_role.values()]
        return max([self.router.drain_timeout_s, *found])

    def workers_of(self, role: str) -> dict[str, WorkerConfig]:
        """The workers of one role, by name."""
        return {name: worker for name, worker in self.workers.items() if worker.role == role}

    def with_default_places(self, folder: Path) -> ClusterConfig:
        """With catalog, store, disk cache and keys in `folder`, except those that the configuration names."""
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
        sections = {"catalog": catalog, "store": store, "residency": residency, "integrity": integrity}
        return self.model_copy(update=sections)


def _check_ports_differ(workers: dict[str, WorkerConfig]) -> None:
    """Raise ValueError if ports that count up meet each other."""
    taken: dict[tuple[str, int], str] = {}
    for name, worker in workers.items():
        for field in ("control_port", "metrics_port", "engine_port", "bootstrap_port"):
            place = f"workers.{name}.{field}"
            if port := getattr(worker, field):
                if other := taken.get((worker.host, port)):
                    raise ValueError(f"{place} is {port}, and so is {other}; ports of replicas count up")
                taken[worker.host, port] = place
