"""How many GPUs a load needs, and how many slots."""

from __future__ import annotations

from dataclasses import replace

from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.search import bound_per_s, fewest_pairs, fewest_unified
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools

_SLOTS = (2, 4, 8, 16, 32, 64)


def gpus(options: Options, say: Say) -> list[Row]:
    """The fewest unified workers, and the fewest pairs, that serve the load within the objectives."""
    rows: list[Row] = []
    for layout, find in (("unified", fewest_unified), ("pairs", fewest_pairs)):
        found = find(options)
        if found is None:
            say(f"  {layout}: no number of workers holds the objectives")
            rows.append({"layout": layout, "gpus": None})
            continue
        pools, row = found
        rows.append({"layout": layout, "pools": str(pools), "gpus": pools.num_workers, **row})
        say(
            f"  {pools}: {pools.num_workers} GPUs, {row['good_share']:.1%} good, TTFT p95 {row['ttft_ms_p95']:.0f} ms, "
            f"TPOT p95 {row['tpot_ms_p95']:.1f} ms"
        )
    return rows


def slots(options: Options, say: Say) -> list[Row]:
    """One unified worker and short prompts of many adapters: a batch holds as many adapters as there are slots."""
    few = replace(options, prompt_tokens=128, output_tokens=64, length_cv=0.0, num_adapters=512, zipf=0.5)
    few = replace(few, host_adapters=512, base_share=0.0, requests_per_s=0.75 * bound_per_s(few, Pools(unified=1)))
    rows = []
    for number in _SLOTS:
        outcome = simulate(replace(few, slots=number).scenario(Pools(unified=1)), few.seed)
        fills = outcome.num_fills / max(1, outcome.num_arrived)
        rows.append({"slots": number, "fills_per_request": round(fills, 3), **few.figures(outcome)})
        say(f"  {number} slots: TTFT p95 {rows[-1]['ttft_ms_p95']:.0f} ms, {fills:.2f} fills per request")
    return rows
