"""The sections `engine` and `workers` of `cluster.yaml`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from cluster.config.fields import LAST_PORT, MAX_DURATION_S, Host, Port, Seconds, Section
from cluster.config.problems import all_in_words


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


Gpus = Annotated[int | tuple[int | str, ...], BeforeValidator(_check_gpus)]


ENGINE_METRICS_PATH = "/engine/metrics"  # of an agent, at its metrics_port
# For this host SGLang's prefill engines hand the KV cache to nobody and answer at once (FAKE_BOOTSTRAP_HOST of
# sglang.srt.disaggregation.utils, which tests compare with it).
NOBODY = "2.2.2.2"
_GPU_PAGE_TOKENS = 64  # of KV that moves between GPUs (decision 28)


class EngineConfig(Section):
    """Settings of every SGLang engine of the cluster."""

    device: Literal["cpu", "cuda"] = "cpu"
    max_total_tokens: Annotated[int, Field(ge=64)] | None = None  # KV cache capacity; None: as much as fits in memory
    max_running_requests: Annotated[int, Field(ge=1)] = 64
    chunked_prefill_tokens: Annotated[int, Field(ge=1)] = 2048
    # Tokens per page of the KV cache, a power of two; the same for all prefill and decode workers. Pages of several
    # tokens make KV transfers cheaper, and prompts share whole pages only (docs/workers.md). None: 64 for prefill and
    # decode workers on GPUs if chunked_prefill_tokens is a multiple of that, else 1.
    kv_page_tokens: Annotated[int, Field(ge=1, le=256)] | None = None
    context_length: Annotated[int, Field(ge=8)] | None = None  # None: the model's maximum
    tensor_parallel: Annotated[int, Field(ge=1)] = 1  # number of GPUs that share the model of one engine
    start_timeout_s: Seconds = 600.0
    # Who may reach the ports over which KV transfers are arranged: names, addresses or networks such as 10.2.0.0/16.
    # None: the hosts of the peers, including discovered ones. Needed if peers connect from other addresses.
    kv_peers: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/-]{1,253}$")], ...] | None = None
    # If a part of the engine makes no progress for this long, the engine gets no requests; after twice or four times
    # this, it is restarted. One that computes has longer (docs/workers.md). None: hangs are not detected.
    hang_timeout_s: Annotated[float, Field(ge=1, le=MAX_DURATION_S)] | None = 10.0
    # Appended to SGLang's command line; a worker's are added to the cluster's. Of a repeated option, the last counts.
    extra_arguments: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        page = self.kv_page_tokens or 1
        if page & (page - 1):
            raise ValueError(f"kv_page_tokens is {page}; give a power of two, such as 16 or 64")
        if self.chunked_prefill_tokens % page:
            raise ValueError(
                f"chunked_prefill_tokens is {self.chunked_prefill_tokens}; give a multiple of kv_page_tokens, {page}"
            )
        return self

    def kv_page_tokens_of(self, role: str) -> int:
        """Tokens per page of the KV cache of a worker with this role."""
        if self.kv_page_tokens is not None:
            return self.kv_page_tokens
        exchanges_kv = role in ("prefill", "decode")
        if exchanges_kv and self.device == "cuda" and self.chunked_prefill_tokens % _GPU_PAGE_TOKENS == 0:
            return _GPU_PAGE_TOKENS
        return 1


class EachWorkerConfig(Section):
    """What `workers` says of one worker, and `discovery` of all workers of a role. A port of 0 is chosen at start."""

    metrics_port: Port = 0  # the agent's HTTP: /metrics, /health, /ready
    engine_port: Port = 0  # SGLang's HTTP
    bootstrap_port: Port = 0  # prefill only: where decode engines request KV
    # The engine's GPUs: a list of indices or UUIDs (for all replicas, in order), or a number of free ones (per
    # replica). None: as many as tensor_parallel if any worker has `gpus`, else the first ones.
    gpus: Gpus | None = None
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None  # None: the engine's; if that is not set, one per GPU
    domain: str = ""  # NVLink or RDMA domain: the router prefers pairs within one; empty: unknown
    drain_timeout_s: Seconds | None = None  # to finish requests in flight before it stops; None: router.drain_timeout_s
    engine: dict[str, object] = Field(default_factory=dict)  # overrides of the cluster's `engine` section


class WorkerConfig(EachWorkerConfig):
    """One worker: an agent and the engine that it supervises."""

    role: Literal["prefill", "decode", "unified"]  # unified: prefill and decode in one engine
    host: Host = "127.0.0.1"
    # Where the engine and SGLang's KV bootstrap server listen; None: `host`. Use 127.0.0.1 if the router and the peers
    # are on this host.
    engine_host: Host | None = None
    control_port: Port = 0  # the agent's gRPC
    # Creates equal workers X-0, X-1, … instead of X. Given ports count up from X-0's.
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1

    @property
    def holds_adapters(self) -> bool:
        return self.role != "decode"

    def with_resolved_gpus(self, cluster_engine: EngineConfig) -> Self:
        """The worker with the tensor parallel size that its GPUs imply, and its replicas' GPUs. Raises ValueError."""
        engine, own = self.engine_in(cluster_engine), self.tensor_parallel
        override = self.engine.get("tensor_parallel")
        if own is not None and override is not None and str(own) != str(override):
            raise ValueError(f"tensor_parallel is {own}, but engine.tensor_parallel is {override}; keep one")
        if self.gpus is None:
            takes_gpus = self.replicas > 1 and engine.device == "cuda"
            return self.model_copy(update={"gpus": engine.tensor_parallel}) if takes_gpus else self
        if engine.device == "cpu":
            raise ValueError("gpus: its engine has `device: cpu`; set `device: cuda`, or leave `gpus` out")
        if "--base-gpu-id" in engine.extra_arguments:
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
        try:
            engine = EngineConfig.model_validate({**cluster_engine.model_dump(), **own})
        except ValidationError as error:
            raise ValueError(f"engine.{all_in_words(error, EngineConfig)}") from error
        if "extra_arguments" not in own:
            return engine
        return engine.model_copy(update={"extra_arguments": cluster_engine.extra_arguments + engine.extra_arguments})

    def replica(self, number: int) -> Self:
        """One of its replicas. Raises ValueError if there is no such port."""
        given: dict[str, Any] = {}
        for field in ("control_port", "metrics_port", "engine_port", "bootstrap_port"):
            if port := getattr(self, field):
                if port + number > LAST_PORT:
                    raise ValueError(
                        f"{field}: replica {number} would have {port + number}, and the last port is {LAST_PORT}"
                    )
                given[field] = port + number
        if isinstance(self.gpus, tuple):
            count = len(self.gpus) // self.replicas
            given["gpus"] = self.gpus[number * count : (number + 1) * count]
        return self.model_copy(update={**given, "replicas": 1})
