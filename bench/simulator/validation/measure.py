"""Curves of an endpoint with one unified worker, from what its clients see. Nothing else may use the machine.

Waves of equal requests: prompts alone, many at once, and beside an answer, which each of them stops for as long as the
engine reads it; few and many answers at once; cold adapters. A first token is later than the end of its batch by what
router, tokenizer and HTTP take: that is no engine's time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.errors import SystemFailed
from bench.load.record import Record
from bench.simulator.curves import Curves, Decode, Limits, Line, Loads, Point, Prefill

_SHORT = 8  # tokens of a prompt
_PROMPTS_PER_STREAM = 4  # times the repeats
_MAX_STREAM = 4000  # tokens


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests of one shape, so many at a time. The adapters come in turn; none: the base model."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int
    adapters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the curves are measured."""

    prompts: tuple[int, ...] = (16, 64, 128, 256, 512)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, int] = (_SHORT, 256)  # of the decode steps
    num_tokens: int = 48  # of their answers
    repeats: int = 5
    num_cold: int = 4  # adapters, one after the other and then as many at once
    num_resident: int = 4  # adapters; fewer than slots


Send = Callable[[Wave], Awaitable[Sequence[Record]]]
Beside = Callable[
    [Wave, Wave], Awaitable[tuple[Sequence[Record], Sequence[Record]]]
]  # the second begins within the first


async def measure_curves(send: Send, beside: Beside, grid: Grid, limits: Limits, name: str, text: str) -> Curves:
    """`send` runs a wave. Adapters from number `num_resident` on have never been used. Raises SystemFailed."""

    async def asked(wave: Wave) -> Sequence[Record]:
        return _checked(await send(wave))

    async def alone_ms(tokens: int, adapters: tuple[int, ...] = ()) -> float:
        records = await asked(Wave(tokens, 1, 1, grid.repeats, adapters))
        return 1000 * statistics.median(each.ttft_s for each in records)

    await asked(Wave(grid.prompts[-1], 4, 2, 4))  # whatever happens once
    alone = [await alone_ms(tokens) for tokens in grid.prompts]
    step_points, kv_token_ns = await _steps(asked, grid, limits)
    stalls = await _stalls_ms(asked, beside, grid, max(alone), step_points[0][1])
    batch = _rising(list(zip(map(float, grid.prompts), stalls, strict=True)))
    answer_ms = max(0.0, statistics.median(one - Line(batch)(x) for x, one in zip(grid.prompts, alone, strict=True)))
    middle = grid.prompts[len(grid.prompts) // 2]
    prompt_ms = await _prompt_ms(asked, grid, limits, Line(batch))

    resident = tuple(range(grid.num_resident))
    await asked(Wave(_SHORT, 1, 1, grid.num_resident, resident))
    adapted_ms = await alone_ms(middle, resident[:1]) - answer_ms
    short_ms = await alone_ms(_SHORT, resident[:1])
    cold = tuple(range(grid.num_resident, grid.num_resident + 2 * grid.num_cold))
    one_by_one = await asked(Wave(_SHORT, 1, 1, grid.num_cold, cold[: grid.num_cold]))
    load_ms = 1000 * statistics.median(each.ttft_s for each in one_by_one) - short_ms
    at_once = await asked(Wave(_SHORT, 1, grid.num_cold, grid.num_cold, cold[grid.num_cold :]))
    firsts = sorted(1000 * each.ttft_s for each in at_once)
    serial_ms = (firsts[-1] - firsts[0]) / max(1, len(firsts) - 1)
    store_ms = max(0.0, load_ms)
    return Curves(
        name=name,
        text=text,
        sources={"all": "measured from outside by prelude bench simulate --validate"},
        prefill=Prefill(
            batch, prompt_ms=_rounded(prompt_ms), adapter_factor=_rounded(max(1.0, adapted_ms / Line(batch)(middle)))
        ),
        decode=Decode(step_points, _rounded(kv_token_ns)),
        loads=Loads(
            store_ms=_rounded(store_ms), disk_ms=_rounded(store_ms), serial_ms=_rounded(min(serial_ms, store_ms))
        ),
        limits=limits,
        answer_ms=_rounded(answer_ms),
    )


async def _stalls_ms(asked: Send, beside: Beside, grid: Grid, longest_ms: float, step_ms: float) -> list[float]:
    """How long each prompt keeps an answer waiting: what the answer takes beside prompts, less what it takes alone."""
    number = _PROMPTS_PER_STREAM * grid.repeats
    num_tokens = min(_MAX_STREAM, math.ceil((1500 + 2 * number * longest_ms) / step_ms))
    stream = Wave(_SHORT, num_tokens, 1, 1)
    (alone,) = await asked(stream)
    found = []
    for tokens in grid.prompts:
        streams, prompts = await beside(stream, Wave(tokens, 1, 1, number))
        (answer,) = _checked(streams)
        if max(each.end_s for each in _checked(prompts)) > answer.end_s:
            raise SystemFailed(f"{number} prompts of {tokens} tokens took longer than an answer of {num_tokens} tokens")
        longer_s = (answer.token_s[-1] - answer.token_s[0]) - (alone.token_s[-1] - alone.token_s[0])
        found.append(1000 * longer_s / number)
    return found


def _checked(records: Sequence[Record]) -> Sequence[Record]:
    if failed := next((each for each in records if each.error is not None), None):
        raise SystemFailed(f"a request failed while curves were measured: {failed.error} {failed.detail}")
    return records


async def _steps(asked: Send, grid: Grid, limits: Limits) -> tuple[tuple[Point, ...], float]:
    """Decode steps by the number of sequences, and what a token of KV adds: least squares over both contexts."""
    batches = [number for number in grid.batches if number <= limits.max_running]
    rows, values = [], []
    for at, number in enumerate(batches):
        for context in grid.contexts:
            records = await asked(Wave(context, grid.num_tokens, number, number))
            # The last of the first tokens until the first of the last ones: all are generated for.
            from_s, to_s = max(each.token_s[0] for each in records), min(each.token_s[-1] for each in records)
            gaps = [
                after - before
                for each in records
                for before, after in zip(each.token_s, each.token_s[1:], strict=False)
                if before >= from_s and after <= to_s
            ]
            if not gaps:  # the first answer ended before the last began
                gaps = [gap for each in records for gap in each.itl_s]
            row = np.zeros(len(batches) + 1)
            row[at], row[-1] = 1.0, number * (context + grid.num_tokens / 2)
            rows.append(row)
            values.append(1000 * statistics.median(gaps))
    found = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    if found[-1] < 0:  # noise: context costs nothing
        found[:-1] = [statistics.mean(values[2 * at : 2 * at + 2]) for at in range(len(batches))]
    return _rising(list(zip(map(float, batches), found[:-1].tolist(), strict=True))), max(0.0, 1e6 * float(found[-1]))


async def _prompt_ms(asked: Send, grid: Grid, limits: Limits, batch_ms: Line) -> float:
    """What each prompt of a full batch costs beside its tokens: all of engine and router that does not overlap."""
    number = min(grid.batches[-1], limits.max_running)
    tokens = max(1, min(grid.prompts[-1], limits.chunk_tokens) // number)
    records = await asked(Wave(tokens, 1, number, number * grid.repeats))
    lasted_ms = 1000 * (max(each.end_s for each in records) - min(each.sent_s for each in records))
    return max(0.0, lasted_ms / len(records) - batch_ms(tokens * number) / number)


def _rising(points: Sequence[Point]) -> tuple[Point, ...]:
    """Times that do not fall where there is more to do: what falls is noise."""
    found: list[Point] = []
    for x, y in points:
        found.append((x, _rounded(max(y, 0.01, found[-1][1] if found else 0.0))))
    return tuple(found)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
