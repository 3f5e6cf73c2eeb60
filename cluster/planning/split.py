"""How workers of one host are divided among the roles: so that they hold the most requests. Behind `prelude init`."""

from cluster.local.memory_plan import GPU_SHARE, ModelSizes, engine_memory
from cluster.planning.gpus import GPUS, Gpu
from cluster.planning.pools import Demand, Pool, generating_pool, prefill_pool
from cluster.planning.speed import Speed
from cluster.planning.workload import Workload

_TTFT_S = 1.0
_ALIKE = 1.1  # plans are no more exact than that, and unified workers move no KV
_TPOTS_S = (0.02, 0.05, 0.1)  # the first that the model keeps on these GPUs


def gpu_named(name: str) -> Gpu:
    """By what nvidia-smi calls it; an H100 if it is none of the known ones, since ratios differ little."""
    return next((gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name.lower()), GPUS["h100-sxm"])


def best_split(
    sizes: ModelSizes, gpu: Gpu, tensor_parallel: int, num_workers: int, lengths: tuple[int, int]
) -> tuple[int, int, int] | None:
    """The numbers of prefill, decode and unified workers; None if no division keeps any objective.

    `lengths`: mean tokens of prompts and answers.
    """
    speed = Speed(sizes, gpu, tensor_parallel)
    memory = engine_memory(sizes, int(gpu.memory_bytes * GPU_SHARE), tensor_parallel, 0)
    for tpot_s in _TPOTS_S:
        workload = Workload(1.0, *lengths, ttft_s=_TTFT_S, tpot_s=tpot_s, working_set=32)
        demand = Demand(workload, 0.0, 0.0, 0.0)
        prefill = _most_per_s(prefill_pool(speed, memory, demand))
        decode = _most_per_s(generating_pool(speed, memory, demand, "decode"))
        unified = _most_per_s(generating_pool(speed, memory, demand, "unified"))
        held = {(0, 0, num_workers): num_workers * unified * _ALIKE}
        for count in range(1, num_workers):
            held[count, num_workers - count, 0] = min(count * prefill, (num_workers - count) * decode)
        best = max(held, key=lambda each: held[each])
        if held[best]:
            return best
    return None


def _most_per_s(pool: Pool | None) -> float:
    return 0.0 if pool is None else pool.most_per_s
