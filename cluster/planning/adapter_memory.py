"""Where a workload's adapters reside (engine slots, host memory, disk), and how often one is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from adapters.model.footprint import expert_bytes, lora_bytes, reft_bytes, slot_bytes
from cluster.config.schema import AdapterLimits
from cluster.errors import ConfigError
from cluster.host_memory import gib
from cluster.local.memory_plan import ModelSizes
from cluster.planning.workload import Workload

COPIES = 1.3  # of an adapter in use, under the router's placement: docs/evidence.md, "Adapters stay at home"
ENGINE_SHARED_BYTES = 4 * 1024**3  # of /dev/shm, for SGLang, NCCL and UCX: the chart's sharedMemoryGiB
_MAX_SLOTS = 512
COLD_LOAD_S = 14e-3  # of a small adapter, until the engine has it; measured
_PARALLEL_LOADS = 32  # at most, as by default


def copies(num_workers: int) -> float:
    """Of an adapter in use, over so many workers: never more than one each."""
    return min(COPIES, float(num_workers))


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Bytes, without tensor parallelism."""

    mean: int  # of an adapter in the form that engines load
    largest: int
    slot: int

    @classmethod
    def of(cls, workload: Workload, sizes: ModelSizes) -> AdapterSizes:
        base, dtype = sizes.base, sizes.dtype
        if workload.max_expert_rank and base.experts is None:
            raise ConfigError(f"--adapter: {base} has no experts; give projections, such as all or q_proj+v_proj")
        each = [
            lora_bytes(base, kind.rank, kind.targets, dtype)
            + expert_bytes(base, kind.rank if kind.experts else 0, dtype)
            if kind.kind == "lora"
            else reft_bytes(base, kind.rank, dtype)
            for kind in workload.kinds
        ]
        if 0 in each:
            targets = "+".join(workload.kinds[each.index(0)].targets)
            raise ConfigError(
                f"--adapter: engines of {base} adapt none of {targets}; give projections of attention, such as q_proj, "
                "or experts"
            )
        weights = [kind.share for kind in workload.kinds]
        mean = sum(size * weight for size, weight in zip(each, weights, strict=True)) / sum(weights)
        slot = slot_bytes(base, workload.max_rank, workload.target_modules, dtype, workload.max_expert_rank)
        return cls(math.ceil(mean), max(each), slot)


def num_slots(workload: Workload, new_tokens: float, chunk_tokens: int) -> int:
    """As many as a prefill batch has prompts: the next power of two, of at least the schema's default.

    No more than there are adapters that requests name.
    """
    prompts = math.ceil(chunk_tokens / max(1.0, new_tokens))
    wanted = max(AdapterLimits().slots, 1 << (prompts - 1).bit_length())
    named = workload.total_adapters if workload.cold_requests_share else workload.working_set
    return min(wanted, max(1, named), _MAX_SLOTS)


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Of each worker that holds adapters."""

    host_bytes: int  # residency.host_bytes
    disk_bytes: int  # residency.disk_bytes
    parallel_loads: int  # residency.parallel_loads
    needed_bytes: int  # for the working set to be resident; more than host_bytes if that was limited
    loads_per_s: float
    load_s: float  # of one adapter from the store
    store_bytes_per_s: float

    @property
    def shared_memory_bytes(self) -> int:
        """Of /dev/shm."""
        return self.host_bytes + ENGINE_SHARED_BYTES


def adapter_memory(
    workload: Workload,
    sizes: AdapterSizes,
    num_workers: int,
    *,
    store_bytes_per_s: float,
    host_bytes: int | None,
) -> AdapterMemory:
    """For so many workers that hold adapters, which may take so much memory each.

    Raises ConfigError if adapters cannot be loaded as fast as requests ask for them.
    """
    load_s = COLD_LOAD_S + sizes.mean / store_bytes_per_s
    per_worker = copies(num_workers) * workload.working_set / num_workers
    # Adapters outside of the working set pass through, and so do those on their way.
    passing = workload.cold_requests_share * workload.requests_per_s / num_workers * load_s + 8
    passing = min(passing, float(workload.total_adapters))
    needed = math.ceil(per_worker * sizes.mean + passing * sizes.largest)
    given = needed if host_bytes is None else min(needed, host_bytes)
    if given < 2 * sizes.largest:
        raise ConfigError(
            f"--host-memory-gib: an adapter takes {gib(sizes.largest)}, and a worker must hold two; give more than "
            f"{gib(2 * sizes.largest)}"
        )
    held = max(0.0, given - passing * sizes.largest) / (per_worker * sizes.mean)
    # Those that do not fit are loaded from disk, or from the store, for every request: as if all were asked for equally
    # often. With hot ones fewer are.
    missed = 1 - min(1.0, held)
    cold = workload.cold_requests_share
    loads = workload.requests_per_s / num_workers * (cold + (1 - cold) * missed)
    parallel = max(8, math.ceil(2 * loads * load_s))
    if parallel > _PARALLEL_LOADS:
        raise ConfigError(
            f"each of {num_workers} workers would load {loads:.0f} adapters of {gib(sizes.mean)} a second, "
            f"{load_s * 1000:.0f} ms each: more than {_PARALLEL_LOADS} at a time. Give more --host-memory-gib "
            f"(the working set takes {gib(needed)} per worker), a faster --store-gbit, or a smaller --cold-share"
        )
    disk = math.ceil(copies(num_workers) * workload.total_adapters / num_workers * sizes.mean) + sizes.largest
    return AdapterMemory(given, disk, parallel, needed, loads, load_s, loads * sizes.mean)
