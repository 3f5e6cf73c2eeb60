"""Pairs and unified workers at equal numbers of GPUs: ratios and mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.search import highest_rate
from bench.simulator.scenario import Pools

SHAPES = ((2048, 128), (512, 512))
TPOTS_MS = (15.0, 30.0, 100.0)


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
