"""A plan as settings: a cluster.yaml for one host, and values for the Helm chart. Both pass the real schemas."""

import math
from pathlib import Path
from typing import Any

import yaml

from cluster.config.schema import AdapterLimits, ClusterConfig, ResidencyConfig
from cluster.local.initial_config import name_of
from cluster.local.memory_plan import ModelSizes
from cluster.planning.adapter_memory import ENGINE_SHARED_BYTES
from cluster.planning.plan import CHUNK_TOKENS, Plan
from cluster.planning.pools import Pool
from cluster.planning.workload import Workload

_GIB = 1024**3
_MIB = 1024**2
_EVERY_ENGINE = {"device": "cuda", "chunked_prefill_tokens": CHUNK_TOKENS}


def cluster_settings(plan: Plan, workload: Workload, sizes: ModelSizes, model: Path) -> dict[str, Any]:
    """The fields of cluster.yaml. Workers have no hosts yet: as it is, it is for one host with all the GPUs."""
    settings = {
        "model": {"path": str(model.resolve()), "name": name_of(model), "dtype": sizes.dtype},
        "engine": dict(_EVERY_ENGINE),
        "workers": {pool.role: _worker(pool) for pool in plan.pools},
        **_shared(plan, workload),
    }
    ClusterConfig.model_validate(settings)
    return settings


def helm_values(plan: Plan, workload: Workload, sizes: ModelSizes, model: Path) -> dict[str, Any]:
    """A piece of the chart's values: what the plan decides. Where the model, the catalog and the store are is not."""
    pools: dict[str, Any] = {"prefill": {}, "decode": {}, "unified": {}}
    for pool in plan.pools:
        pools[pool.role] = {
            "main": {
                "replicas": pool.num_workers,
                "tensorParallel": pool.tensor_parallel,
                "sharedMemoryGiB": ENGINE_SHARED_BYTES // _GIB,
                "engine": _engine(pool),
            }
        }
    return {
        "model": {"name": name_of(model)},
        "cluster": {
            "model": {"dtype": sizes.dtype},
            "engine": dict(_EVERY_ENGINE),
            **_shared(plan, workload),
        },
        "pools": {role: named for role, named in pools.items() if named},
    }


def as_yaml(settings: dict[str, Any]) -> str:
    """Text that reads back as the same."""
    return yaml.safe_dump(settings, sort_keys=False, width=110)


def _worker(pool: Pool) -> dict[str, Any]:
    number: dict[str, Any] = {"replicas": pool.num_workers} if pool.num_workers > 1 else {}
    return {"role": pool.role, **number, "gpus": pool.tensor_parallel, "engine": _engine(pool)}


def _engine(pool: Pool) -> dict[str, Any]:
    return {"max_total_tokens": pool.memory.max_tokens, "max_running_requests": pool.max_running}


def _shared(plan: Plan, workload: Workload) -> dict[str, Any]:
    limits = AdapterLimits()
    files = 2 * plan.adapter_sizes.largest  # in float32, twice the size in the serving dtype
    return {
        "adapter_limits": {
            "max_rank": workload.max_rank,
            **({"max_expert_rank": workload.max_expert_rank} if workload.max_expert_rank else {}),
            "slots": plan.slots,
            "target_modules": list(workload.target_modules),
            **({"max_bytes": _up(files, _MIB)} if files > limits.max_bytes else {}),
        },
        "residency": {
            "host_bytes": _up(plan.host_bytes, _MIB),
            "disk_bytes": max(ResidencyConfig().disk_bytes, _up(plan.host_bytes, _MIB)),
        },
    }


def _up(value: float, unit: int) -> int:
    return unit * math.ceil(value / unit)
