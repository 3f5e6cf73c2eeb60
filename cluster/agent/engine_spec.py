"""Builds a worker's engine spec from cluster.yaml, and checks that the engine can serve the base model."""

from __future__ import annotations

from pathlib import Path

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import BaseModel
from cluster.agent.kv_transfer import check_kv_transfers
from cluster.config.schema import ClusterConfig, WorkerConfig
from cluster.config.tracing import trace_settings
from cluster.errors import ConfigError
from engine.arguments import AdapterSlots, EngineSpec, EngineTraces
from engine.base_models import fitted_to
from engine.errors import BaseModelNotRun

_PEERS = {"prefill": "decode", "decode": "prefill"}


def base_model_of(config: ClusterConfig) -> BaseModel:
    """Read the base model's configuration. Raises ConfigError."""
    try:
        return BaseModel.read(config.model.path)
    except BaseModelInvalid as error:
        raise ConfigError(f"model.path: {error}") from error


def fitted_spec(config: ClusterConfig, name: str, scratch: Path, base: BaseModel) -> EngineSpec:
    """One worker's engine spec, fitted to the base model. Raises ConfigError if the engine cannot serve it."""
    check_kv_transfers(config, base)
    try:
        return fitted_to(engine_spec(config, name, scratch), base)
    except BaseModelNotRun as error:
        raise ConfigError(f"worker {name} cannot start: {error}") from error


def engine_spec(config: ClusterConfig, name: str, scratch: Path) -> EngineSpec:
    """One worker's engine spec as configured."""
    worker, engine, limits = config.workers[name], config.engine_of(name), config.adapter_limits
    return EngineSpec(
        role=worker.role,
        device=engine.device,
        model_path=config.model.path,
        served_name=config.model.name,
        dtype=config.model.dtype,
        host=worker.host,
        port=worker.engine_port,
        bootstrap_port=worker.bootstrap_port if worker.role == "prefill" else None,
        max_total_tokens=engine.max_total_tokens,
        max_running_requests=engine.max_running_requests,
        chunked_prefill_tokens=engine.chunked_prefill_tokens,
        context_length=engine.context_length,
        tensor_parallel=engine.tensor_parallel,
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        adapters=AdapterSlots(limits.slots, limits.max_rank, limits.target_modules) if worker.holds_adapters else None,
        extra_arguments=(*engine.extra_arguments, *engine.more_arguments),
        scratch=scratch,
        visible_gpus=_visible_gpus(config, name),
        traces=_traces(config, name),
    )


def _traces(config: ClusterConfig, name: str) -> EngineTraces | None:
    settings = trace_settings(config.tracing)
    return EngineTraces(settings, name) if settings is not None and settings.engine_level else None


def _visible_gpus(config: ClusterConfig, name: str) -> tuple[int, ...]:
    """The worker's GPUs, then those of its peers on the same host. Empty if `cluster.local.gpus` gave it none.

    A process maps a peer's KV cache by CUDA IPC. With the peer's GPU visible that is the same as for SGLang's
    `--base-gpu-id`, which takes only consecutive GPUs. Workers without peers see their own only.
    """
    worker = config.workers[name]
    peers = config.workers_of(_PEERS[worker.role]).values() if worker.role in _PEERS else ()
    own = _indices(worker)
    theirs = {index for peer in peers if peer.host == worker.host for index in _indices(peer)}
    return (*own, *sorted(theirs - set(own))) if own else ()


def _indices(worker: WorkerConfig) -> tuple[int, ...]:
    return tuple(gpu for gpu in worker.gpus if isinstance(gpu, int)) if isinstance(worker.gpus, tuple) else ()
