"""How many requests a second one worker serves within the objectives, and so how many workers a pool has."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cluster.local.memory_plan import EngineMemory
from cluster.planning.speed import Speed
from cluster.planning.workload import Workload

IN_TIME = 0.95  # of the requests: the share that `Workload.ttft_s` is for
MAX_RUNNING = 1024  # requests of one decode or unified engine
_STEPS = 60  # of a bisection
_SELDOM = 1.64  # standard deviations above the mean; fits two H200 at 10, 20 and 50 ms a token (docs/capacity.md)
MAX_BUSY = 0.95  # of a worker's time; beyond it waits grow without bound at the least disturbance

Role = Literal["prefill", "decode", "unified"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal workers of one role, and how they are when the load is spread evenly."""

    role: Role
    num_workers: int
    tensor_parallel: int
    memory: EngineMemory
    requests_per_s: float  # of one worker
    most_per_s: float  # that one serves within the objectives
    batch: float  # requests that generate at once, in the mean; 0 for prefill
    tpot_s: float  # 0 for prefill
    wait_s: float  # for the prompt to be read, that IN_TIME of the requests do not exceed; 0 for decode
    prompt_s: float  # of one prompt alone; 0 for decode
    limit: str  # what forbids more requests per worker

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.tensor_parallel

    @property
    def load(self) -> float:
        """Share of what its workers serve within the objectives."""
        return self.requests_per_s / self.most_per_s

    @property
    def max_running(self) -> int:
        """Requests at once, with room for disturbances: a multiple of 32."""
        return min(MAX_RUNNING, max(32, 32 * math.ceil(busiest(self.batch) / 32)))


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload as a pool sees it."""

    workload: Workload
    cached_tokens: float  # of a prompt, that need not be computed
    transfer_s: float  # of a prompt's KV to the decode worker; 0 where it does not move
    later_step_s: float  # until the first token goes out, after it was computed

    @property
    def new_tokens(self) -> float:
        return self.workload.prompt_tokens - self.cached_tokens

    @property
    def tokens(self) -> int:
        """Of a request at its end."""
        return self.workload.prompt_tokens + self.workload.generated_tokens

    @property
    def mean_context(self) -> float:
        """Tokens of KV of a request that generates, over its time."""
        return self.workload.prompt_tokens + self.workload.generated_tokens / 2


def closed_loop_rate(speed: Speed, demand: Demand, batch: float, role: Role) -> float:
    """Requests/s of an engine that always has so many. A unified one shares its time between prompts and steps."""
    reading = 0.0 if role == "decode" else _prompt_cost_s(speed, demand)
    step = speed.step_s(batch, demand.mean_context)
    return 1 / (reading + demand.workload.generated_tokens * step / batch)


def prefill_pool(speed: Speed, memory: EngineMemory, demand: Demand) -> Pool | None:
    """None if no number of workers is in time, or a prompt does not fit."""
    if memory.max_tokens < 2 * demand.workload.prompt_tokens:
        return None
    cost, alone = _prompt_cost_s(speed, demand), _prompt_alone_s(speed, demand)
    spare = demand.workload.ttft_s - alone - demand.transfer_s - demand.later_step_s
    most = _most_per_s(MAX_BUSY / cost, lambda per_s: wait_s(per_s, cost, demand.workload.length_cv, IN_TIME) <= spare)
    if not most:
        return None
    number = math.ceil(demand.workload.requests_per_s / most)
    each = demand.workload.requests_per_s / number
    waits = wait_s(each, cost, demand.workload.length_cv, IN_TIME)
    limit = "prompts keep it busy" if most * cost > MAX_BUSY - 1e-3 else "the first token would be late"
    return Pool("prefill", number, speed.tensor_parallel, memory, each, most, 0.0, 0.0, waits, alone, limit)


def generating_pool(speed: Speed, memory: EngineMemory, demand: Demand, role: Role) -> Pool | None:
    """Decode or unified workers. None if no number of them is in time, or a request does not fit."""
    workload = demand.workload
    cost = 0.0 if role == "decode" else _prompt_cost_s(speed, demand)
    alone = 0.0 if role == "decode" else _prompt_alone_s(speed, demand)
    fitting = min(MAX_RUNNING, memory.max_tokens // demand.tokens)

    def rate(batch: float) -> float:
        return closed_loop_rate(speed, demand, batch, role)

    def tpot(batch: float, per_s: float) -> float:
        free = 1 - per_s * cost
        return speed.step_s(batch, demand.mean_context) / free if free > 0 else math.inf

    def is_in_time(batch: float) -> bool:
        # While an answer is generated, more prompts than usual are read: their number is Poisson's.
        num_prompts = rate(batch) * workload.generated_tokens * workload.tpot_s
        reading_s = cost * (num_prompts + _SELDOM * math.sqrt(num_prompts)) / workload.generated_tokens
        return speed.step_s(busiest(batch), demand.mean_context) + reading_s <= workload.tpot_s

    def fits(batch: float) -> bool:
        return busiest(batch) <= fitting

    batch = _largest(lambda each: is_in_time(each) and fits(each), MAX_RUNNING)
    if batch is None:
        return None
    most, limit = rate(batch), "KV memory would be full" if not fits(batch + 0.01) else "tokens would come too slowly"
    if not fits(batch + 0.01) and fitting == MAX_RUNNING:
        limit = f"an engine runs {MAX_RUNNING} requests"

    def running(per_s: float) -> float:
        return _largest(lambda size: rate(size) <= per_s, batch) or 0.0

    def waits(per_s: float) -> float:
        return 0.0 if role == "decode" else wait_s(per_s, cost, workload.length_cv, IN_TIME)

    if role == "unified":
        # Prompts stretch the step after the first token, too: both grow with the load.
        reading = _most_per_s(
            min(most, MAX_BUSY / cost),
            lambda per_s: waits(per_s) + alone + tpot(running(per_s), per_s) <= workload.ttft_s,
        )
        if not reading:
            return None
        if reading < most:
            most, limit = reading, "the first token would be late, or prompts keep it busy"
    number = math.ceil(workload.requests_per_s / most)
    each = workload.requests_per_s / number
    mean = running(each)
    return Pool(
        role, number, speed.tensor_parallel, memory, each, most, mean, tpot(mean, each), waits(each), alone, limit
    )


def wait_s(arrivals_per_s: float, service_s: float, cv: float, share: float) -> float:
    """The wait that this share of the requests does not exceed; infinite for a worker that cannot keep up.

    Mean by Pollaczek and Khinchine for M/G/1, W = ρ s (1 + cv²) / 2 (1 - ρ); those who wait at all, a share ρ, wait
    exponentially distributed times (exact for M/M/1).
    """
    busy = arrivals_per_s * service_s
    if busy >= 1:
        return math.inf
    if busy <= 1 - share:
        return 0.0
    mean = busy * service_s * (1 + cv**2) / (2 * (1 - busy))
    return mean / busy * math.log(busy / (1 - share))


def busiest(mean_in_flight: float) -> float:
    """Requests in flight that a worker with this mean seldom exceeds: Poisson, two standard deviations above."""
    return mean_in_flight + 2 * math.sqrt(mean_in_flight)


def _prompt_cost_s(speed: Speed, demand: Demand) -> float:
    return speed.prompt_s(demand.new_tokens, demand.cached_tokens, demand.workload.lora_share)


def _prompt_alone_s(speed: Speed, demand: Demand) -> float:
    return speed.prompt_alone_s(demand.new_tokens, demand.cached_tokens, demand.workload.lora_share)


def _most_per_s(highest: float, is_in_time: Callable[[float], bool]) -> float:
    """The most requests/s up to `highest` that are in time; 0 if a hundredth of them is not."""
    return highest * (_largest(lambda part: is_in_time(part * highest), 1.0) or 0.0)


def _largest(holds: Callable[[float], bool], most: float) -> float | None:
    """The largest value up to `most` for which a claim holds that fails beyond it; None if it fails for the least."""
    low, high = min(0.01, most), most
    if holds(high):
        return high
    if not holds(low):
        return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
