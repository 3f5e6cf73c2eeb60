"""`prelude bench simulate`: the highest rate of each layout of equal size within the objectives."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measuring import provenance
from bench.measuring.output import require_folder, write_json
from bench.simulator.curves import Curves, EngineTimes
from bench.simulator.options import Options, Row
from bench.systems.layout import Layout

_PRECISION = 0.05  # of the highest rate


def run(options: Options, command: str, json_path: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Simulate every layout, print a line each, write the file; returns its content. Raises BenchError."""
    require_folder(json_path)
    options.check()
    curves = options.worker
    say(f"{curves.name}: {curves.text}")
    rows: list[Row] = []
    document: dict[str, Any] = {
        **provenance.head("simulate", command, asdict(options)),
        "curves": {"name": curves.name, "text": curves.text, "sources": curves.sources},
        "rows": rows,
    }
    given = [Layout.parse(text) for text in options.layouts]
    for layout in given or layouts(options.gpus):
        rows.append({"layout": str(layout), **highest_rate(options, layout)})
        say(f"  {layout}: {rows[-1]['requests_per_s']:.1f} requests/s")
        write_json(document, json_path)  # after each, since some take long
    best = max(rows, key=lambda row: row["requests_per_s"])
    say(f"{best['layout']} serves the most within TTFT {options.ttft_ms:g} ms and TPOT {options.tpot_ms:g} ms")
    return document


def layouts(gpus: int) -> Iterator[Layout]:
    """Unified workers, pairs in every ratio, and two mixtures."""
    yield Layout(unified=gpus)
    yield from (Layout(prefill, gpus - prefill) for prefill in range(1, gpus))
    if gpus >= 4:
        quarter = gpus // 4
        yield Layout(quarter, quarter, gpus - 2 * quarter)
    if gpus >= 8:
        yield Layout(2 * (gpus // 8), gpus // 8, gpus - 3 * (gpus // 8))


def highest_rate(options: Options, layout: Layout) -> Row:
    """By halving, down from what no layout can exceed. The row of the highest rate that held; rate 0: none did."""
    high = bound_per_s(options, layout) * 1.05
    best, low, rate = {"requests_per_s": 0.0, "goodput_per_s": 0.0}, 0.0, high / 2
    while high > low * (1 + _PRECISION) and high > 0.05:
        row = options.measure(layout, rate)
        if row["good_share"] >= options.share:
            low, best = rate, {"requests_per_s": round(rate, 3), **row}
        else:
            high = rate
        rate = math.sqrt(low * high) if low else high / 2
    return best


def bound_per_s(options: Options, layout: Layout) -> float:
    """No layout of these numbers serves more: each worker always has full batches, and does nothing else."""
    adapted = 1 - options.base_share if options.num_adapters else 0.0
    read_s, generate_s = request_s(options.worker, options.prompt_tokens, options.output_tokens, adapted)
    alone = layout.unified / (read_s + generate_s)
    return alone + (min(layout.prefill / read_s, layout.decode / generate_s) if layout.prefill else 0.0)


def request_s(curves: Curves, prompt: float, output: float, adapted: float) -> tuple[float, float]:
    """What a mean request costs a worker that reads, and one that generates, in full batches."""
    times, limits = EngineTimes(curves), curves.limits
    chunks = prompt / limits.chunk_tokens
    read_s = chunks * times.batch_s(limits.chunk_tokens, 0, 0, adapted)
    read_s += times.batch_s(0, 1, prompt**2 / 2, adapted) - times.batch_s(0, 0, 0, adapted)
    number = max(1, min(limits.max_running, int(limits.max_kv_tokens / (prompt + output))))
    step_s = times.steps_s[number] + times.kv_token_s * number * (prompt + output / 2)
    return read_s, max(1, output - 1) * step_s / number
