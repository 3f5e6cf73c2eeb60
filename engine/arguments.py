"""Builds the command line and the environment of one SGLang server."""

import json
import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from engine.access import ADMIN_KEY_VARIABLE, IN_ENVIRONMENT, KEY_VARIABLE, EngineKeys, EngineTls
from engine.client import EngineClient
from engine.hooks.hook import ADAPTER_ROLES, DECODE, PAIR_ROLES, SWITCHING, can_be
from engine.hooks.kv.peers import FOUND_PEERS_VARIABLE, PEERS_VARIABLE
from engine.hooks.memory_pool import EXPERT_RANK_VARIABLE
from engine.hooks.report import DEVICE_VARIABLE, REPORT_DIR_VARIABLE, ROLE_VARIABLE
from engine.hooks.requests.events import EVENTS_VARIABLE
from process.addresses import host_and_port
from process.tracing.span import TraceSettings

MODEL_OVERRIDES = "--json-model-override-args"
_RESERVED_TOKENS = 512  # what a decode engine keeps free for an answer, SGLang's default


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapter capacity that an engine reserves."""

    count: int  # distinct adapters in one prefill batch
    max_rank: int
    target_modules: tuple[str, ...]
    max_expert_rank: int = 0  # of LoRA on experts; 0: the slots have no room for any


@dataclass(frozen=True, slots=True)
class EngineTraces:
    """Where SGLang sends the spans of requests that the router traces."""

    settings: TraceSettings
    worker: str  # identifies the engine in traces


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that determines how one SGLang server starts."""

    role: str  # "prefill", "decode", "unified", "switching" (a pair's, prefill at first), or "stock": SGLang unmodified
    device: str  # "cpu" or "cuda"
    model_path: Path
    served_name: str
    dtype: str
    host: str
    port: int
    bootstrap_port: int | None  # prefill and switching only
    max_total_tokens: int | None
    max_running_requests: int
    chunked_prefill_tokens: int
    context_length: int | None
    tensor_parallel: int
    tool_call_parser: str | None
    reasoning_parser: str | None
    adapters: AdapterSlots | None  # None: an engine without adapters
    extra_arguments: tuple[str, ...]
    scratch: Path  # folder that lives as long as the engine: temporary files and process reports
    # GPUs that its processes see, by nvidia-smi's index: one per rank, then those of the engines that it exchanges KV
    # with. Empty: those that this process sees.
    visible_gpus: tuple[int, ...] = ()
    traces: EngineTraces | None = None  # None: SGLang's tracing is off
    kv_peers: tuple[str, ...] | None = None  # who may reach its KV ports: names, addresses or networks; None: everyone
    kv_found_peers: Path | None = None  # file with the addresses of more, which come and go (`write_found_peers`)
    keys: EngineKeys | None = None  # None: whoever reaches the server may use it, as benchmarks do
    tls: EngineTls | None = None  # None: plain HTTP
    kv_page_tokens: int = 1  # tokens per page of the KV cache; the same at both ends of a KV transfer
    model_overrides: str | None = None  # a JSON object of fields in the place of config.json's
    max_events_per_s: int = 0  # that it streams, before events carry several tokens; 0: no bound

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"{'http' if self.tls is None else 'https'}://{host_and_port(self.host, self.port)}"

    @property
    def report_dir(self) -> Path:
        """Folder that the engine's processes write their reports to."""
        return self.scratch / "reports"

    def client(self, timeout_s: float = 10.0) -> EngineClient:
        """A client of the server, with both of its keys."""
        keys, tls = self.keys, self.tls
        return EngineClient(
            self.url,
            timeout_s,
            key=keys.requests if keys else "",
            admin_key=keys.admin if keys else "",
            tls=tls.call if tls else None,
        )


def command(spec: EngineSpec) -> list[str]:
    """The argument vector that starts the server."""
    arguments: dict[str, object] = {
        "model-path": spec.model_path,
        "served-model-name": spec.served_name,
        "dtype": spec.dtype,
        "device": spec.device,
        "host": spec.host,
        "port": spec.port,
        "tp-size": spec.tensor_parallel,
        "max-running-requests": spec.max_running_requests,
        "chunked-prefill-size": spec.chunked_prefill_tokens,
        "grammar-backend": "xgrammar",
        # Small models that may emit whitespace do so until the length limit.
        "constrained-json-disable-any-whitespace": True,
        "enable-cache-report": True,
        "enable-metrics": True,
        "disable-hybrid-swa-memory": True,  # layers with a window keep all KV, in the one pool that plans count
        "load-snapshot-publish-interval": 1,  # drain and cancellation need current load reports
        "sleep-on-idle": True,
        "skip-server-warmup": True,  # the agent's warm-up covers more
        "log-level": "info",
        "log-level-http": "warning",
    }
    if spec.model_overrides is not None:
        arguments[MODEL_OVERRIDES.removeprefix("--")] = spec.model_overrides
    if can_be(spec.role, ADAPTER_ROLES):
        # For embeddings. Costs nothing while nobody asks: the states are those that the logits are computed from.
        arguments["return-hidden-states-mode"] = "last"
    if spec.role != "stock":
        arguments["enable-dynamic-batch-tokenizer"] = True  # of completions' texts, in a thread; chats have one anyway
    if can_be(spec.role, PAIR_ROLES):
        mode = "prefill" if spec.role == SWITCHING else spec.role
        arguments |= {"disaggregation-mode": mode, "disaggregation-transfer-backend": "nixl"}
    if spec.role == SWITCHING:
        arguments["enable-pd-role-switch"] = True
        # For prompts whose KV is on its way, as SGLang's decode engines have by default.
        extra = 2 * spec.max_running_requests if spec.max_running_requests <= 32 else 0
        arguments["disaggregation-decode-extra-slots"] = extra
    if can_be(spec.role, DECODE) or spec.device == "cpu":  # or stock SGLang's decode engine
        # What retracted requests have is copied as needed. SGLang would keep a page-locked pool for it.
        arguments["disaggregation-decode-retraction-backup"] = "cpu_tensor"
    if can_be(spec.role, DECODE) and spec.max_total_tokens is not None and spec.max_total_tokens < 8 * _RESERVED_TOKENS:
        # Prompts have the rest. A page at least, since retracted requests come back in whole pages.
        arguments["num-reserved-decode-tokens"] = max(spec.max_total_tokens // 8, spec.kv_page_tokens)
    optional = {
        "max-total-tokens": spec.max_total_tokens,
        "context-length": spec.context_length,
        "tool-call-parser": spec.tool_call_parser,
        "reasoning-parser": spec.reasoning_parser,
        "disaggregation-bootstrap-port": spec.bootstrap_port,
        "page-size": spec.kv_page_tokens if spec.kv_page_tokens > 1 else None,  # else SGLang's choice: mostly 1
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if spec.keys is not None:
        arguments |= {"api-key": IN_ENVIRONMENT, "admin-api-key": IN_ENVIRONMENT}
    if spec.tls is not None:
        files = spec.tls.files
        arguments |= {"ssl-certfile": files.certificate, "ssl-keyfile": files.key, "ssl-ca-certs": files.ca}
    if spec.device == "cpu":
        arguments |= {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            # Of the memory that is free now, for weights and KV. A small share fails when other processes, such as the
            # peer's engine, take memory meanwhile; without a limit on tokens it is what the KV cache takes.
            "mem-fraction-static": 0.05 if spec.max_total_tokens is None else 0.8,
            "disable-overlap-schedule": True,
        }
    if spec.adapters is not None:
        arguments |= {
            "enable-lora": True,
            # One extra slot for base tokens. Stock SGLang counts the base model among its slots.
            "max-loras-per-batch": spec.adapters.count + (spec.role != "stock"),
            "max-lora-rank": spec.adapters.max_rank,
            "lora-target-modules": spec.adapters.target_modules,
        }
        if spec.role != "stock":
            # Of itself on GPUs, for some models on several ranks. ReFT would read a layer's output before ranks sum it.
            arguments["enforce-disable-flashinfer-allreduce-fusion"] = True
            arguments["prefill-decode-interval"] = 0  # SGLang takes 22 for Qwen3-VL
        if spec.role == "unified" and spec.device == "cuda":
            # Prompts wait for some steps of those that generate, and are read together.
            arguments |= {"prefill-decode-interval": 4, "prefill-decode-interval-min-bs": 8}
        if spec.device == "cpu":
            arguments["lora-backend"] = "torch_native"
        elif spec.adapters.max_expert_rank:
            arguments["moe-runner-backend"] = "triton"  # where LoRA on experts has been run; on an H100 the default
    if spec.traces is not None:
        arguments |= {"enable-trace": True, "otlp-traces-endpoint": spec.traces.settings.endpoint}
    return [sys.executable, "-m", "engine.launch", *_flags(arguments), *spec.extra_arguments]


_NIXL_PARAMETERS = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"


def _flags(arguments: dict[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flags.append(f"--{name}")
        if isinstance(value, tuple):
            flags.extend(str(item) for item in value)
        elif value is not True:
            flags.append(str(value))
    return flags


def _nixl_parameters(given: str) -> str:
    """Parameters of NIXL's backend, UCX: no threads, so a peer, and with it each write, has one endpoint.

    SGLang's eight threads have an endpoint each, to which writes of 1,024 and more descriptors are divided. If one
    fails, the write has failed, while the others go on writing to pages that the decode engine then takes for free. And
    the endpoints of idle threads keep their eight sockets to a peer that has ended.
    """
    try:
        return json.dumps(json.loads(given) | {"num_threads": "0"})
    except (ValueError, TypeError):
        return given  # SGLang refuses it, and says what it must be


def environment(spec: EngineSpec, inherited: dict[str, str]) -> dict[str, str]:
    """The server's environment variables: the inherited ones, with ours on top."""
    ours = {
        ROLE_VARIABLE: spec.role,
        DEVICE_VARIABLE: spec.device,
        REPORT_DIR_VARIABLE: str(spec.report_dir),
        "TMPDIR": str(spec.scratch / "tmp"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_RUST_SERVER": "0",  # it takes requests past the hooks: keys, adapters in use
        "TOKENIZERS_PARALLELISM": "false",
        # A failed scheduler ends the engine at once, and the agent starts a new one.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # A row of logits that are NaN or all infinite ends the engine in sampling, for every request of the batch. An
        # adapter whose finite weights overflow makes one; so does a grammar that allows only what min_tokens forbids.
        "SGLANG_SANITIZE_NAN_LOGITS": "1",
        # Detect a dead peer and fail its KV rooms within seconds. The router's deadlines bound how long a
        # request waits; these only free resources in the engine.
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",  # the least that SGLang takes
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "3",  # in a row; one takes up to 5 s where the peer stalls
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
        # A decode engine keeps the pages of a failed room until the prefill engine has said that its writes have ended,
        # or has ended itself (`engine.hooks.kv.held_rooms`).
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "inf",
        _NIXL_PARAMETERS: _nixl_parameters(inherited.get(_NIXL_PARAMETERS) or "{}"),
        # With attention backends that read a batch's KV late (trtllm_mha, the default on Blackwell), cached KV would
        # leave a prefill engine before it is computed: NIXL transfers do not wait for SGLang's event.
        "SGLANG_ENABLE_PREFILL_WAR_READ_DONE": "0",
    }
    if is_address(spec.host) and not (inherited.get("SGLANG_HOST_IP") or inherited.get("HOST_IP")):
        ours["SGLANG_HOST_IP"] = spec.host  # KV's handshakes listen here; else on the address of the default route
    if spec.kv_peers is not None:
        ours[PEERS_VARIABLE] = ",".join(spec.kv_peers)
    if spec.kv_found_peers is not None:
        ours[FOUND_PEERS_VARIABLE] = str(spec.kv_found_peers)
    if spec.keys is not None:  # no command line: others on the host can read that
        ours |= {KEY_VARIABLE: spec.keys.requests, ADMIN_KEY_VARIABLE: spec.keys.admin}
    if spec.visible_gpus:
        # Indices, since SGLang reads them as integers; in the order of nvidia-smi, which is not CUDA's default.
        ours |= {
            "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in spec.visible_gpus),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    if spec.device == "cpu":
        # Two engines share the machine; more threads than cores starve both.
        ours |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
        ours["TORCHDYNAMO_DISABLE"] = "1"  # else the first requests of some models wait 10 s for a C++ compiler
        if spec.tensor_parallel > 1:  # one core per rank, round robin
            cores = [str(rank % (os.cpu_count() or 1)) for rank in range(spec.tensor_parallel)]
            ours |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores)}
    ours[EVENTS_VARIABLE] = str(spec.max_events_per_s)
    if spec.adapters is not None:
        ours[EXPERT_RANK_VARIABLE] = str(spec.adapters.max_expert_rank)
    if spec.traces is not None:
        ours |= _trace_environment(spec.traces, inherited)
    return {**inherited, **ours}


def _trace_environment(traces: EngineTraces, inherited: dict[str, str]) -> dict[str, str]:
    """What SGLang and OpenTelemetry's SDK in it read."""
    names = "OTEL_RESOURCE_ATTRIBUTES"
    own = f"service.instance.id={traces.worker}"
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",  # the router samples; nothing else, such as warm-up, is traced
        names: f"{inherited[names]},{own}" if inherited.get(names) else own,
        "SGLANG_TRACE_LEVEL": inherited.get("SGLANG_TRACE_LEVEL", "2"),  # 3: a span per decoded token
    }


def is_address(host: str) -> bool:
    """True for an IP address that other engines can connect to."""
    try:
        return not ip_address(host).is_unspecified
    except ValueError:
        return False
