"""The loss of a rack."""

from __future__ import annotations

from dataclasses import replace

from bench.simulator.questions.options import Options, Row, Say
from bench.simulator.questions.search import bound_per_s
from bench.simulator.run import simulate
from bench.simulator.scenario import Loss, Pools

_RACKS = 8
_STEP_S = 2.0
BEFORE_S, AFTER_S, BACK_S = 20.0, 100.0, 60.0  # seconds before the loss, after it, and until workers are back
_NORMAL = 1.5  # times the p99 TTFT before the loss


def rack(options: Options, say: Say) -> list[Row]:
    """One of eight racks loses its power, at 60% load; with workers that come back after a minute, and without."""
    lose_at_s, end_s = options.warm_up_s + BEFORE_S, options.warm_up_s + BEFORE_S + AFTER_S
    half = max(_RACKS, options.gpus // 2)
    rows = []
    for pools in (Pools(unified=2 * half, racks=_RACKS), Pools(half, half, racks=_RACKS)):
        for back_after_s in (None, BACK_S):
            load = replace(options, seconds=BEFORE_S + AFTER_S, requests_per_s=0.6 * bound_per_s(options, pools))
            loss = Loss(lose_at_s, "rack-0", is_silent=True, back_after_s=back_after_s)
            outcome = simulate(load.scenario(pools, losses=(loss,)), load.seed)
            steps = outcome.over_time(load.slo, _STEP_S)
            before = [step for step in steps if load.warm_up_s <= step["at_s"] <= lose_at_s - _STEP_S]
            normal_ms = max(step["ttft_ms_p99"] for step in before)
            after = [step for step in steps if lose_at_s - _STEP_S < step["at_s"] < end_s]
            slow = [step["at_s"] for step in after if step["ttft_ms_p99"] > _NORMAL * normal_ms or step["not_served"]]
            row = {
                "pools": str(pools),
                "requests_per_s": round(load.requests_per_s, 1),
                "back_after_s": back_after_s,
                "lost_workers": pools.num_workers // _RACKS,
                "normal_ttft_ms_p99": normal_ms,
                "worst_ttft_ms_p99": max(step["ttft_ms_p99"] for step in after),
                "recovery_s": round(max(slow) + _STEP_S - lose_at_s, 1) if slow else 0.0,
                "retries": outcome.num_retries,
                "cold_loads_before": sum(step["cold_loads"] for step in before),
                "cold_loads_after": sum(step["cold_loads"] for step in after),
                **{name: value for name, value in load.figures(outcome).items() if name != "cold_loads"},
                "over_time": steps,
            }
            rows.append(row)
            back = "gone for good" if back_after_s is None else f"back after {back_after_s:.0f} s"
            say(
                f"  {pools}, {row['lost_workers']} lost, {back}: p99 TTFT {normal_ms:.0f} -> "
                f"{row['worst_ttft_ms_p99']:.0f} ms, normal after {row['recovery_s']:.0f} s, {row['retries']} tried "
                f"again, {row['cut']} cut, {row['failed'] + row['refused']} failed, {row['cold_loads_after']} loads"
            )
    return rows
