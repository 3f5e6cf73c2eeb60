"""The highest rate that a layout serves within the objectives."""

from __future__ import annotations

import math

from bench.simulator.curves import Curves, EngineTimes
from bench.simulator.questions.options import Options, Row
from bench.simulator.scenario import Pools

_PRECISION = 0.05  # of the highest rate


def bound_per_s(options: Options, pools: Pools) -> float:
    """No layout of these numbers serves more: each worker always has full batches, and does nothing else."""
    read_s, generate_s = service_s(options)
    alone = pools.unified / (read_s + generate_s)
    return alone + (min(pools.prefill / read_s, pools.decode / generate_s) if pools.prefill else 0.0)


def service_s(options: Options) -> tuple[float, float]:
    """What a request costs a worker that reads, and one that generates, in full batches."""
    base_share = options.base_share if options.num_adapters else 1.0
    return request_s(options.worker, options.prompt_tokens, options.output_tokens, 1 - base_share)


def request_s(curves: Curves, prompt: float, output: float, adapted: float) -> tuple[float, float]:
    """The same for a mean request, with this share of prompts under adapters."""
    times, limits = EngineTimes(curves), curves.limits
    chunks = prompt / limits.chunk_tokens
    read_s = chunks * times.batch_s(limits.chunk_tokens, 0, 0, adapted)
    read_s += times.batch_s(0, 1, prompt**2 / 2, adapted) - times.batch_s(0, 0, 0, adapted)
    number = max(1, min(limits.max_running, int(limits.max_kv_tokens / (prompt + output))))
    step_s = times.steps_s[number] + times.kv_token_s * number * (prompt + output / 2)
    return read_s, max(1, output - 1) * step_s / number


def highest_rate(options: Options, pools: Pools) -> Row:
    """By halving, down from what no layout can exceed. The row of the highest rate that held; rate 0: none did."""
    high = bound_per_s(options, pools) * 1.05
    best, low, rate = {"requests_per_s": 0.0, "goodput_per_s": 0.0}, 0.0, high / 2
    while high > low * (1 + _PRECISION) and high > 0.05:
        row = options.measure(pools, rate)
        if row["good_share"] >= options.share:
            low, best = rate, {"requests_per_s": round(rate, 3), **row}
        else:
            high = rate
        rate = math.sqrt(low * high) if low else high / 2
    return best
