"""Terminal output: lines while the load runs, then the results, errors first."""

import time
from collections.abc import Callable
from typing import Any, TextIO

from bench.load.process import Progress

_LAG_WARNING_MS = 10.0
_CPU_WARNING_SHARE = 0.7  # of one core, per process
_ROWS = (
    ("TTFT", "ttft_ms", "ms"),
    ("ITL", "itl_ms", "ms"),
    ("TPOT", "tpot_ms", "ms"),
    ("end to end", "e2e_ms", "ms"),
    ("sent late by", "send_lag_ms", "ms"),
)
_EVERY_S = 10.0


class ProgressLine:
    """A line every ten seconds."""

    def __init__(self, out: TextIO, num_requests: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._of = "" if num_requests is None else f"/{num_requests}"
        self._now = now
        self._began_at = self._last_at = now()
        self._last = Progress(0, 0, 0, 0)

    def __call__(self, progress: Progress) -> None:
        now, before = self._now(), self._last
        if (seconds := now - self._last_at) < _EVERY_S:
            return
        self._last_at, self._last = now, progress
        parts = [
            f"{now - self._began_at:5.0f} s",
            f"{progress.num_done}{self._of} requests",
            f"{(progress.num_done - before.num_done) / seconds:.1f}/s",
            f"{(progress.num_tokens - before.num_tokens) / seconds:.0f} tokens/s",
            f"{progress.num_in_flight} in flight",
        ]
        if progress.num_failed:
            parts.append(f"{progress.num_failed} FAILED")
        print("  ".join(parts), file=self._out, flush=True)


def table(found: dict[str, Any]) -> str:
    """A summary as text."""
    lines = _error_lines(found)
    lines.append(
        f"{found['num_good']} of {found['num_requests']} requests in {found['duration_s']:.1f} s: "
        f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.0f} output tokens/s, "
        f"{found['total_tokens_per_s']:.0f} tokens/s with prompts"
    )
    if found["goodput"] is not None:
        limits = ", ".join(f"{key} {limit:g} ms" for key, limit in found["slo_ms"].items())
        goodput = found["goodput"]
        lines.append(f"goodput ({limits}): {goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} of all")
    if found["num_short"]:
        lines.append(f"{found['num_short']} answers were shorter than asked for")
    if found["num_good"]:
        lines.append(f"{'':<20}{'mean':>11}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}")
    for name, key, unit in _ROWS:
        if (row := found[key]) is not None:
            cells = "".join(f"{row[column]:>11.2f}" for column in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"{name:<20}{cells} {unit}")
    lag = found["send_lag_ms"]
    if lag is not None and lag["p99"] > _LAG_WARNING_MS and found["num_failed"] < found["num_requests"]:
        lines.append(
            f"warning: 1 % of the requests left {lag['p99']:.0f} ms late or later, and latencies include it: "
            "the generator could not keep up; use more --processes."
        )
    return "\n".join(lines)


def phase_line(phase: dict[str, Any]) -> str:
    """A phase of a load in one line."""
    found = phase["summary"]
    parts = [f"{phase['prompt']}+{phase['output']} tokens, {phase['requests_per_s']:g} requests/s"]
    if found["goodput"] is not None:
        parts.append(f"{found['goodput']['share']:.1%} within the objectives")
    for name, key, unit in _ROWS:
        if key in ("ttft_ms", "tpot_ms") and (row := found[key]) is not None:
            parts.append(f"{name} p50 {row['p50']:.0f}, p99 {row['p99']:.0f} {unit}")
    if found["num_failed"]:
        parts.append(f"{found['num_failed']} FAILED")
    return f"{phase['duration_s']:g} s: {', '.join(parts)}"


def busy_warning(generator: dict[str, Any]) -> str:
    """A line, or nothing. In a closed loop nothing else tells: requests that leave late are due late, too."""
    if generator["cpu_share"] <= _CPU_WARNING_SHARE:
        return ""
    return (
        f"\nwarning: the generator was busy for {generator['cpu_share']:.0%} of the time, and latencies include its "
        "own delays: use more --processes, or cores that nothing else uses."
    )


def _error_lines(found: dict[str, Any]) -> list[str]:
    if not found["num_failed"]:
        return []
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["errors"]["by_kind"].items())
    lines = [
        f"{found['num_failed']} of {found['num_requests']} requests FAILED: {kinds}. They are in no latency below."
    ]
    for each in found["errors"]["most_frequent"][:5]:
        status = "" if each["status"] is None else f" {each['status']}"
        lines.append(f"  {each['count']} x {each['kind']}{status}: {each['detail']}")
    return lines
