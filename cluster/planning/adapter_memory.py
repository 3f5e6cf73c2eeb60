"""Where a workload's adapters reside: engine slots and host memory."""

import math
from dataclasses import dataclass
from typing import Self

from adapters.model.footprint import expert_bytes, lora_bytes, reft_bytes, slot_bytes
from cluster.config.schema import AdapterLimits
from cluster.errors import ConfigError
from cluster.local.memory_plan import ModelSizes
from cluster.planning.workload import Workload

COPIES = 1.3  # of an adapter in use, under the router's placement: docs/evidence.md, "Adapters stay at home"
ENGINE_SHARED_BYTES = 4 * 1024**3  # of /dev/shm, for SGLang, NCCL and UCX: the chart's sharedMemoryGiB
_MAX_SLOTS = 512
_ON_THEIR_WAY = 8  # adapters that a worker loads at a time


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
    def of(cls, workload: Workload, sizes: ModelSizes) -> Self:
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
    return min(wanted, workload.working_set, _MAX_SLOTS)


def host_bytes(workload: Workload, sizes: AdapterSizes, num_workers: int) -> int:
    """For adapters in host memory, of each of so many workers: the working set's part, and those on their way."""
    held = copies(num_workers) * workload.working_set / num_workers
    return math.ceil(held * sizes.mean + min(_ON_THEIR_WAY, workload.working_set) * sizes.largest)
