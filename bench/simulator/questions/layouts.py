"""Pairs and unified workers at equal numbers of GPUs: ratios, mixtures, changing roles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.search import bound_per_s, highest_rate
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools, RoleChanges
from bench.simulator.traffic import Replay

SHAPES = ((2048, 128), (512, 512))
TPOTS_MS = (15.0, 30.0, 100.0)
PHASE_S = 300.0


def layouts(gpus: int) -> Iterator[Pools]:
    yield Pools(unified=gpus)
    yield from (Pools(prefill, gpus - prefill) for prefill in range(1, gpus))
    if gpus >= 4:
        quarter = gpus // 4
        yield Pools(quarter, quarter, gpus - 2 * quarter)
    if gpus >= 8:
        yield Pools(2 * (gpus // 8), gpus // 8, gpus - 3 * (gpus // 8))


def ratios(options: Options, say: Say) -> list[Row]:
    """The highest rate within the objectives, of every layout, for two shapes and three objectives of TPOT."""
    rows = []
    for prompt, output in SHAPES:
        for tpot_ms in TPOTS_MS:
            asked = replace(options, prompt_tokens=prompt, output_tokens=output, tpot_ms=tpot_ms)
            found = []
            for pools in layouts(options.gpus):
                best = highest_rate(asked, pools)
                found.append({"prompt_tokens": prompt, "output_tokens": output, "tpot_ms": tpot_ms,
                              "pools": str(pools), **best})  # fmt: skip
            rows += found
            top = sorted(found, key=lambda row: -row["requests_per_s"])
            unified = found[0]["requests_per_s"]
            say(
                f"  {prompt}+{output}, TPOT {tpot_ms:g} ms: "
                + ", ".join(f"{row['pools']} {row['requests_per_s']:.1f}/s" for row in top[:3])
                + f"; all unified {unified:.1f}/s"
            )
    return rows


def roles(options: Options, say: Say) -> list[Row]:
    """Traffic turns from long prompts to long answers: fixed pairs, pairs whose workers change, unified workers."""
    rows = []
    for row in _role_rows(options):
        rows.append(row)
        say(
            f"  {row['layout']}: {row['good_share']:.1%} good, TTFT p95 {row['ttft_ms_p95']:.0f} ms, TPOT p95 "
            f"{row['tpot_ms_p95']:.1f} ms, {row['changes']} changes, {row['cut'] + row['failed']} lost"
        )
    return rows


def _role_rows(options: Options) -> Iterator[Row]:
    half = options.gpus // 2
    reading = replace(options, prompt_tokens=2048, output_tokens=64, seconds=PHASE_S, warm_up_s=0.0, length_cv=0.3)
    writing = replace(reading, prompt_tokens=256, output_tokens=768)
    fixed = Pools(half, half)
    phases = []
    for number, phase in enumerate((reading, writing, reading)):
        most_per_s = max(bound_per_s(phase, Pools(each, options.gpus - each)) for each in range(1, options.gpus))
        for arrival in phase.traffic(0.6 * most_per_s).arrivals(options.seed + number):
            phases.append(replace(arrival, at_s=arrival.at_s + number * PHASE_S))
    for name, pools, changes in (
        ("fixed", fixed, None),
        ("changing by the metrics, 30 s each", fixed, RoleChanges()),
        ("changing by the metrics, 2 s each", fixed, RoleChanges(change_s=2.0, drain_s=10.0, period_s=2.0)),
        ("unified", Pools(unified=options.gpus), None),
    ):
        scenario = options.scenario(pools, traffic=Replay(phases), role_changes=changes)
        outcome = simulate(scenario, options.seed)
        row = {"layout": name, "pools": str(pools), "changes": outcome.num_changes, **outcome.summary(options.slo)}
        yield {**row, "over_time": outcome.over_time(options.slo, 10.0)}
