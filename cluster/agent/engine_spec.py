"""Builds a worker's engine spec from cluster.yaml, and checks that the engine can serve the base model."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import BaseModel
from adapters.model.base_weights import weights_digest
from cluster.agent.kv_transfer import check_kv_transfers
from cluster.config.fields import is_loopback
from cluster.config.schema import ClusterConfig
from cluster.config.tracing import trace_settings
from cluster.config.workers import WorkerConfig
from cluster.control.transport import Transport
from cluster.errors import ConfigError
from engine.access import EngineKeys, EngineTls
from engine.arguments import MODEL_OVERRIDES, AdapterSlots, EngineSpec, EngineTraces
from engine.base_models import fitted_to
from engine.errors import BaseModelNotRun
from engine.hooks.hook import SWITCHING

_LONGEST_SOCKET_PATH = 107  # bytes: Linux's `sun_path` without its final NUL
_A_SOCKET = "engine/tmp/tmp12345678"  # in the agent's folder; the last part is from Python's tempfile
_REFUSED = {
    "--tokenizer-worker-num": "SGLang then checks no key, so anyone who reaches the engine could use it; leave it out",
    "--model-path": "give model.path instead, which its peers learn",
    "--dtype": "give model.dtype instead, which its peers learn",
}
PEER_ROLES = {"prefill": "decode", "decode": "prefill"}  # the other ends of KV transfers


def base_model_of(config: ClusterConfig) -> BaseModel:
    """Read the base model's configuration. Raises ConfigError."""
    try:
        return BaseModel.read(config.model.path)
    except BaseModelInvalid as error:
        raise ConfigError(f"model.path: {error}") from error


def base_weights_of(spec: EngineSpec) -> str:
    """Digest of the base model that an engine loads. Raises ConfigError."""
    try:
        return weights_digest(spec.model_path, "\n".join(_values_of(MODEL_OVERRIDES, spec.extra_arguments)))
    except BaseModelInvalid as error:
        raise ConfigError(f"model.path: {error}") from error


def guarded(spec: EngineSpec, transport: Transport, name: str) -> EngineSpec:
    """The spec with new keys, and with mutual TLS if `tls` is configured and the engine listens beyond this host."""
    tls, files = transport.engine_tls(spec.role, name), transport.files
    is_alone = is_loopback(spec.host)
    engine_tls = None if tls is None or files is None or is_alone else EngineTls(files, tls)
    return replace(spec, keys=EngineKeys.new(), tls=engine_tls)


# Of streams, which one process sends: above it, an event carries up to 8 tokens, or more where they may begin a stop
# string.
_MAX_EVENTS_PER_S = 8000


def fitted_spec(config: ClusterConfig, name: str, scratch: Path, base: BaseModel) -> EngineSpec:
    """One worker's engine spec, fitted to the base model. Raises ConfigError if the engine cannot serve it."""
    check_kv_transfers(config, base)
    spec = engine_spec(config, name, scratch)
    try:
        fitted = fitted_to(spec, base)
    except BaseModelNotRun as error:
        raise ConfigError(f"worker {name} cannot start: {error}") from error
    if fitted.model_overrides is not None and _values_of(MODEL_OVERRIDES, spec.extra_arguments):
        raise ConfigError(
            f"worker {name}: its engine's arguments have {MODEL_OVERRIDES}, which Prelude gives engines of "
            f"{base.architecture} itself; change the model's config.json instead"
        )
    return fitted


def check_socket_paths(name: str, scratch: Path) -> None:
    """Raise ConfigError if the folder's path is too long for the engine's sockets: it would never start."""
    excess = len(os.fsencode(scratch / _A_SOCKET)) - _LONGEST_SOCKET_PATH
    if excess > 0:
        raise ConfigError(
            f"worker {name}: the path of the folder for its temporary files is {excess} bytes too long for the "
            f"engine's sockets in it: {scratch}; give a shorter --scratch, or a shorter TMPDIR"
        )


def engine_spec(config: ClusterConfig, name: str, scratch: Path) -> EngineSpec:
    """One worker's engine spec as configured."""
    worker, engine, limits = config.workers[name], config.engine_of(name), config.adapter_limits
    for option, remedy in _REFUSED.items():
        if _values_of(option, engine.extra_arguments):
            raise ConfigError(f"worker {name}: its engine's arguments have {option}; {remedy}")
    return EngineSpec(
        role=SWITCHING if config.roles_may_change and worker.role in PEER_ROLES else worker.role,
        device=engine.device,
        model_path=config.model.path,
        served_name=config.model.name,
        dtype=config.model.dtype,
        host=worker.engine_host or worker.host,
        port=worker.engine_port,
        bootstrap_port=worker.bootstrap_port if config.may_be(worker.role, "prefill") else None,
        max_total_tokens=engine.max_total_tokens,
        max_running_requests=engine.max_running_requests,
        chunked_prefill_tokens=engine.chunked_prefill_tokens,
        kv_page_tokens=engine.kv_page_tokens_of(worker.role),
        context_length=engine.context_length,
        tensor_parallel=engine.tensor_parallel,
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        adapters=AdapterSlots(limits.slots, limits.max_rank, limits.target_modules, limits.max_expert_rank)
        if config.may_be(worker.role, "prefill", "unified")
        else None,
        extra_arguments=engine.extra_arguments,
        scratch=scratch,
        visible_gpus=_visible_gpus(config, name),
        traces=_traces(config, name),
        kv_peers=_kv_peers(config, name),
        kv_found_peers=scratch.with_name(f"{scratch.name}-kv-peers") if _finds_kv_peers(config, name) else None,
        max_events_per_s=_MAX_EVENTS_PER_S,
    )


def _values_of(option: str, arguments: tuple[str, ...]) -> list[str]:
    """The values given to an option. argparse also takes `--option=value` and abbreviations down to `--op`."""
    found = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        given, is_joined, value = argument.partition("=")
        if len(given) >= len("--op") and option.startswith(given):
            found.append(value if is_joined else following)
    return found


def _traces(config: ClusterConfig, name: str) -> EngineTraces | None:
    settings = trace_settings(config.tracing)
    return EngineTraces(settings, name) if settings is not None else None


def _visible_gpus(config: ClusterConfig, name: str) -> tuple[int, ...]:
    """The worker's GPUs, then those of its peers on the same host. Empty if `cluster.local.gpus` gave it none.

    A process maps a peer's KV cache by CUDA IPC. With the peer's GPU visible this works as with SGLang's
    `--base-gpu-id`, which takes only consecutive GPUs. Workers without peers see only their own.
    """
    worker = config.workers[name]
    peers = _possible_peers(config, worker)
    own = _indices(worker)
    theirs = {index for peer in peers if peer.host == worker.host for index in _indices(peer)}
    return (*own, *sorted(theirs - set(own))) if own else ()


def _kv_peers(config: ClusterConfig, name: str) -> tuple[str, ...] | None:
    worker = config.workers[name]
    if worker.role not in PEER_ROLES:
        return None
    given = config.engine_of(name).kv_peers
    if given is not None:
        return given
    return tuple(sorted({each.engine_host or each.host for each in (worker, *_possible_peers(config, worker))}))


def _possible_peers(config: ClusterConfig, worker: WorkerConfig) -> list[WorkerConfig]:
    """The workers of cluster.yaml that it may exchange KV with, if roles change itself as well."""
    role = PEER_ROLES.get(worker.role)
    return [each for each in config.workers.values() if role is not None and config.may_be(each.role, role)]


def _finds_kv_peers(config: ClusterConfig, name: str) -> bool:
    """Whether the agent must pass the addresses of peers on to the engine."""
    role = PEER_ROLES.get(config.workers[name].role)
    is_found = role is not None and any(config.may_be(each, role) for each in config.discovery.by_role)
    return is_found and config.engine_of(name).kv_peers is None


def _indices(worker: WorkerConfig) -> tuple[int, ...]:
    return tuple(gpu for gpu in worker.gpus if isinstance(gpu, int)) if isinstance(worker.gpus, tuple) else ()
