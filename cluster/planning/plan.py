"""The plan: of all layouts that keep the objectives, the one with the fewest GPUs. Pure arithmetic."""

from dataclasses import dataclass
from typing import Literal

from cluster.errors import ConfigError
from cluster.local.memory_plan import GPU_SHARE, EngineMemory, ModelSizes, can_divide, engine_memory
from cluster.planning.adapter_memory import AdapterSizes, copies, host_bytes, num_slots
from cluster.planning.gpus import Gpu
from cluster.planning.pools import Demand, Pool, Role, busiest, generating_pool, prefill_pool
from cluster.planning.speed import Speed
from cluster.planning.workload import Workload

Layout = Literal["pairs", "unified"]
LAYOUTS: tuple[Layout, ...] = ("unified", "pairs")
TENSOR_PARALLEL = (1, 2, 4, 8)
MAX_NODE_GPUS = 8  # of most servers
CHUNK_TOKENS = 2048  # engine.chunked_prefill_tokens, as `prelude init` writes it
MAX_WORKERS = 1024  # of a pool: `replicas` takes no more
TRANSFER_PART = 0.1  # of the time to the first token, for KV to move, unless the bandwidth is given
LINK_USE = 0.5  # of a link's bandwidth, in the mean
_PREFIX_PART = 0.5  # of the KV memory of workers that read prompts, for cached prefixes


@dataclass(frozen=True, slots=True)
class Site:
    """The available hardware."""

    gpu: Gpu
    tensor_parallel: tuple[int, ...] = TENSOR_PARALLEL  # sizes to choose from
    layouts: tuple[Layout, ...] = LAYOUTS
    kv_bytes_per_s: float | None = None  # between workers of a pair, per worker; None: the plan says what is needed


@dataclass(frozen=True, slots=True)
class KvTraffic:
    """KV on its way from prefill to decode workers."""

    bytes_per_prompt: int
    total_bytes_per_s: float
    prefill_bytes_per_s: float  # out of each prefill worker, in the mean
    decode_bytes_per_s: float  # into each decode worker
    link_bytes_per_s: float  # that each worker's link needs, or has
    transfer_s: float  # of one prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout that keeps the objectives."""

    layout: Layout
    pools: tuple[Pool, ...]
    slots: int
    adapter_sizes: AdapterSizes
    host_bytes: int  # residency.host_bytes, of each worker that holds adapters
    kv: KvTraffic | None  # None: unified workers move none
    cached_share: float  # of prompts, that the prefix caches have; at most Workload.shared_prefix
    ttft_s: float  # that 95 % of the requests do not exceed, when their prompts have the mean length

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def tpot_s(self) -> float:
        """Of the slowest pool that generates."""
        return max(pool.tpot_s for pool in self.pools)

    @property
    def workers(self) -> str:
        """In words."""
        return " + ".join(
            f"{pool.num_workers} {pool.role}{f' of {pool.tensor_parallel} GPUs' if pool.tensor_parallel > 1 else ''}"
            for pool in self.pools
        )


def make_plan(workload: Workload, sizes: ModelSizes, site: Site) -> tuple[Plan, dict[Layout, Plan | str]]:
    """The plan with the fewest GPUs, unified workers among equals, and that of each layout, or why it has none.

    Raises ConfigError, with what to change, if there is none.
    """
    tokens = workload.prompt_tokens + workload.generated_tokens
    if sizes.max_context is not None and tokens > sizes.max_context:
        raise ConfigError(
            f"--prompt-tokens and --generated-tokens make {tokens} tokens, and the model takes {sizes.max_context}; "
            "give shorter ones, or a model with a longer context"
        )
    considered: dict[Layout, Plan | str] = {}
    for layout in site.layouts:
        try:
            considered[layout] = _Layout(layout, workload, sizes, site).plan()
        except ConfigError as error:
            considered[layout] = str(error)
    found = [each for each in considered.values() if isinstance(each, Plan)]
    if not found:
        raise ConfigError("\n".join(f"{layout}: {reason}" for layout, reason in considered.items()))
    return min(found, key=lambda plan: plan.num_gpus), considered


class _Layout:
    def __init__(self, layout: Layout, workload: Workload, sizes: ModelSizes, site: Site) -> None:
        self._layout, self._workload, self._sizes, self._site = layout, workload, sizes, site
        self._adapters = AdapterSizes.of(workload, sizes)
        self._prompt_kv = workload.prompt_tokens * sizes.kv_bytes_per_token

    def plan(self) -> Plan:
        """Raises ConfigError."""
        workload = self._workload
        share, slots = workload.shared_prefix, 1
        while True:
            slots = max(slots, num_slots(workload, workload.prompt_tokens * (1 - share), CHUNK_TOKENS))
            pools = self._pools(share, slots)
            reader = pools[0]
            usable = min(share, self._cached_share(reader))
            if usable >= share - 1e-3:
                break
            share = usable  # fewer prefixes fit than are shared, so prompts cost more, and more workers have more room
        kv = self._kv_traffic(pools) if self._layout == "pairs" else None
        ttft = reader.wait_s + reader.prompt_s + pools[-1].tpot_s + (0.0 if kv is None else kv.transfer_s)
        adapters = host_bytes(workload, self._adapters, reader.num_workers)
        return Plan(self._layout, pools, slots, self._adapters, adapters, kv, share, ttft)

    def _pools(self, share: float, slots: int) -> tuple[Pool, ...]:
        slot_bytes = (slots + 1) * self._adapters.slot
        if self._layout == "unified":
            return (self._best("unified", share, slot_bytes),)
        decode = self._best("decode", share, 0)
        return self._best("prefill", share, slot_bytes, decode.tpot_s), decode

    def _best(self, role: Role, share: float, slot_bytes: int, later_step_s: float = 0.0) -> Pool:
        """The pool with the fewest GPUs, and of those the one with the most workers. Raises ConfigError."""
        transfer_s = self._transfer_s() if role == "prefill" else 0.0
        demand = Demand(self._workload, share * self._workload.prompt_tokens, transfer_s, later_step_s)
        found, reasons = [], []
        for size in self._site.tensor_parallel:
            if not can_divide(self._sizes.base, size):
                reasons.append(f"tensor parallel {size} does not divide the model")
                continue
            usable = int(self._site.gpu.memory_bytes * GPU_SHARE)
            memory = engine_memory(self._sizes, usable, size, slot_bytes)
            if not memory.is_enough:
                reasons.append(f"tensor parallel {size}: no room for KV, {memory.arithmetic}")
                continue
            speed = Speed(self._sizes, self._site.gpu, size)
            if role == "prefill":
                pool = prefill_pool(speed, memory, demand)
            else:
                pool = generating_pool(speed, memory, demand, role)
            if pool is None:
                reasons.append(f"tensor parallel {size}: {_too_slow(speed, memory, demand, role)}")
            elif pool.num_workers > MAX_WORKERS:
                reasons.append(f"tensor parallel {size}: {pool.num_workers} workers, and a pool has {MAX_WORKERS}")
            else:
                found.append(pool)
        if not found:
            raise ConfigError(
                f"no {role} worker on {self._site.gpu.name} serves this: {'; '.join(reasons)}. Give longer --ttft or "
                "--tpot, more --tensor-parallel, a GPU with more memory (--gpu), or fewer --requests-per-s"
            )
        return min(found, key=lambda pool: (pool.num_gpus, pool.tensor_parallel))

    def _transfer_s(self) -> float:
        if self._site.kv_bytes_per_s is None:
            return TRANSFER_PART * self._workload.ttft_s
        return self._prompt_kv / self._site.kv_bytes_per_s

    def _cached_share(self, pool: Pool) -> float:
        """What the caches of the workers that read prompts have room for, beside the requests in flight."""
        workload, tokens = self._workload, pool.memory.max_tokens
        prefix = workload.shared_prefix * workload.prompt_tokens
        if not prefix:
            return 1.0
        in_flight = busiest(pool.batch) * (workload.prompt_tokens + workload.generated_tokens)
        room = pool.num_workers * max(0.0, min(_PREFIX_PART * tokens, tokens - in_flight))
        return workload.shared_prefix * min(1.0, room / (copies(pool.num_workers) * workload.working_set * prefix))

    def _kv_traffic(self, pools: tuple[Pool, ...]) -> KvTraffic:
        """Raises ConfigError if it does not fit the links."""
        rate = self._workload.requests_per_s
        out, into = (self._prompt_kv * pool.requests_per_s for pool in pools[:2])
        transfer = self._transfer_s()
        given = self._site.kv_bytes_per_s
        if given is not None and max(out, into) > LINK_USE * given:
            raise ConfigError(
                f"--kv-gbit: a worker's link would carry {max(out, into) * 8e-9:.1f} Gbit/s of KV in the mean, more "
                f"than half of {given * 8e-9:g}; give faster links, or --layout unified"
            )
        needed = max(self._prompt_kv / transfer, out / LINK_USE, into / LINK_USE)
        return KvTraffic(self._prompt_kv, self._prompt_kv * rate, out, into, given or needed, transfer)


def _too_slow(speed: Speed, memory: EngineMemory, demand: Demand, role: str) -> str:
    workload = demand.workload
    if memory.max_tokens < 2 * demand.tokens:
        return f"requests of {demand.tokens} tokens, and KV for {memory.max_tokens}"
    step = demand.later_step_s or speed.step_s(1, demand.mean_context)
    if role != "prefill" and step > workload.tpot_s:
        return f"a token alone takes {step * 1000:.1f} ms, and --tpot is {workload.tpot_s * 1000:g} ms"
    alone = speed.prompt_alone_s(demand.new_tokens, demand.cached_tokens, workload.lora_share)
    moved = f", its KV {demand.transfer_s * 1000:.0f} ms" if demand.transfer_s else ""
    return (
        f"a prompt alone takes {alone * 1000:.0f} ms{moved}, a token {step * 1000:.1f} ms, and --ttft is "
        f"{workload.ttft_s * 1000:g} ms, --tpot {workload.tpot_s * 1000:g} ms"
    )
