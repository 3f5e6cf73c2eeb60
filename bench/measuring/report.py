"""Turns measurements into medians, ratios, a table, JSON and a plot. Pure except for the plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load on one system."""

    system: str
    adapters: int  # in use, in turn
    repeat: int
    num_requests: int
    duration_s: float
    median_latency_s: float
    foreign_cores: float  # that other processes kept busy meanwhile
    num_cached_tokens: int  # of the prompts

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s


QUIET_CORES = 0.2  # other processes' use of CPU up to which the machine counts as quiet


@dataclass(frozen=True, slots=True)
class Ratio:
    """One system's throughput against another's, or against its own at a fixed number of adapters."""

    label: str
    of: str
    to: str
    to_adapters: int | None = None  # None: the same number
    goal: float = 0.0
    goal_at: int | None = None  # None: at every number of adapters

    def at(self, measurements: Sequence[Measurement], adapters: int) -> float | None:
        """The median of the per-repeat ratios; None if one side was not measured.

        Loads of one repeat run close together, so drift of the machine's speed affects both sides.
        """
        rates = {(each.system, each.adapters, each.repeat): each.requests_per_s for each in measurements}
        to_adapters = adapters if self.to_adapters is None else self.to_adapters
        pairs = [
            rate / rates[self.to, to_adapters, repeat]
            for (system, number, repeat), rate in rates.items()
            if (system, number) == (self.of, adapters) and (self.to, to_adapters, repeat) in rates
        ]
        return statistics.median(pairs) if pairs else None

    @property
    def goal_text(self) -> str:
        where = "every n" if self.goal_at is None else f"n = {self.goal_at}"
        return f">= {self.goal:.2f} at {where}"


RATIOS: Mapping[str, tuple[Ratio, ...]] = {
    "cpu": (
        Ratio("c/a", "unified_lora", "none", goal=0.90),
        Ratio("c/b", "unified_lora", "stock", goal=4.0, goal_at=32),
        Ratio("d/a", "unified_direft", "none", goal=0.95),
        Ratio("e(n)/e(0)", "pd", "pd", to_adapters=0, goal=0.97, goal_at=64),
    ),
    "cuda": (
        Ratio("c/a", "unified_lora", "none", goal=0.97),
        Ratio("c/b", "unified_lora", "stock", goal=2.5, goal_at=512),
        Ratio("d/a", "unified_direft", "none", goal=0.97),
        Ratio("d/b", "unified_direft", "stock", goal=2.5, goal_at=512),
        Ratio("e(n)/e(0)", "pd", "pd", to_adapters=0, goal=0.97, goal_at=512),
    ),
}
LETTERS = {"none": "a", "stock": "b", "unified_lora": "c", "unified_direft": "d", "pd": "e"}
MEANINGS = {
    "none": "one SGLang engine without adapters; the same requests, their adapters left out",
    "stock": "unmodified SGLang multi-LoRA",
    "unified_lora": "one engine, the same LoRA at prefill only",
    "unified_direft": "one engine, DiReFT at prefill only",
    "pd": "a prefill and a decode engine, LoRA on the prefill engine only",
}


def mixed(system: str, all_share: float) -> str:
    """The name of a system whose adapters act at all positions in this share of its requests."""
    return f"{system}@{all_share:g}" if all_share else system


def order_of(system: str) -> tuple[str, str]:
    """Sorts systems by letter, the mixes of one by their share."""
    return LETTERS[system.partition("@")[0]], system


def _meaning(system: str) -> str:
    name, _, share = system.partition("@")
    return f"{MEANINGS[name]}, but at all positions in {float(share):.0%} of the requests" if share else MEANINGS[name]


def medians_of(measurements: Sequence[Measurement]) -> dict[tuple[str, int], float]:
    """Median requests/s over the repeats of each (system, number of adapters), in the order of first measurement."""
    repeats: dict[tuple[str, int], list[float]] = {}
    for each in measurements:
        repeats.setdefault((each.system, each.adapters), []).append(each.requests_per_s)
    return {key: statistics.median(values) for key, values in repeats.items()}


def rows_of(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The "rows" of `--json`."""
    return [
        {"system": system, "adapters": adapters, "requests_per_s": round(value, 3)}
        for (system, adapters), value in sorted(
            medians_of(measurements).items(), key=lambda item: (order_of(item[0][0]), item[0][1])
        )
    ]


def ratios_of(measurements: Sequence[Measurement], ratios: Sequence[Ratio]) -> dict[str, dict[str, float]]:
    """Every ratio whose sides were measured: label -> number of adapters -> ratio."""
    counts = sorted({each.adapters for each in measurements})
    found: dict[str, dict[str, float]] = {}
    for ratio in ratios:
        values = {str(n): round(value, 4) for n in counts if (value := ratio.at(measurements, n)) is not None}
        if values:
            found[ratio.label] = values
    return found


def table(measurements: Sequence[Measurement], ratios: Sequence[Ratio], footnotes: Sequence[str]) -> str:
    """Requests/s by system and number of adapters, then the ratios beside their goals."""
    medians = medians_of(measurements)
    counts = sorted({adapters for _, adapters in medians})
    systems = sorted({system for system, _ in medians}, key=order_of)
    lines = ["requests/s, n =     " + "".join(f"{n:>9}" for n in counts)]
    for system in systems:
        cells = "".join(_cell(medians.get((system, n)), "9.1f") for n in counts)
        lines.append(f"{order_of(system)[0]}  {system:<17}{cells}{_spread_text(measurements, system)}")
    ratio_lines = []
    for ratio in ratios:
        values = [ratio.at(measurements, n) for n in counts]
        if any(value is not None for value in values):
            cells = "".join(_cell(value, "9.3f") for value in values)
            ratio_lines.append(f"{ratio.label:<20}{cells}   goal {ratio.goal_text}")
    lines += ["", *ratio_lines] if ratio_lines else []
    foreign = max(each.foreign_cores for each in measurements)
    if foreign > QUIET_CORES:
        noisy = sum(each.foreign_cores > QUIET_CORES for each in measurements)
        footnotes = [
            *footnotes,
            f"NOT QUIET: during {noisy} of {len(measurements)} loads other processes kept more than {QUIET_CORES} "
            f"cores busy (at most {foreign:.1f}); run it again on a quiet machine.",
        ]
    lines += ["", *(f"{order_of(system)[0]}: {_meaning(system)}" for system in systems), *footnotes]
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return f"{'':>9}" if value is None else f"{value:{form}}"


def _spread_text(measurements: Sequence[Measurement], system: str) -> str:
    """The largest relative deviation of a repeat from its median; empty for a single repeat."""
    if len({each.repeat for each in measurements}) < 2:
        return ""
    medians = medians_of(measurements)
    own = [each for each in measurements if each.system == system]
    spread = max(abs(each.requests_per_s / medians[system, each.adapters] - 1) for each in own)
    return f"   repeats within {spread:.0%} of their median"


def document(measurements: Sequence[Measurement], ratios: Sequence[Ratio], **facts: Any) -> dict[str, Any]:
    """The content of `--json`."""
    raw = [{**asdict(each), "requests_per_s": round(each.requests_per_s, 3)} for each in measurements]
    return {"rows": rows_of(measurements), "ratios": ratios_of(measurements, ratios), **facts, "repeats": raw}


def require_plotting() -> None:
    """Raise BenchError if plots cannot be drawn. Called before hours of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError("--plot needs matplotlib; `make setup-dev` installs it") from error


def draw(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Write a plot of requests/s over the number of adapters, in the format of the suffix."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    medians = medians_of(measurements)
    counts = sorted({adapters for _, adapters in medians})
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for system in sorted({system for system, _ in medians}, key=order_of):
        known = [n for n in counts if (system, n) in medians]
        values = [medians[system, n] for n in known]
        repeats = [
            [each.requests_per_s for each in measurements if (each.system, each.adapters) == (system, n)] for n in known
        ]
        below = [value - min(each) for value, each in zip(values, repeats, strict=True)]
        above = [max(each) - value for value, each in zip(values, repeats, strict=True)]
        positions = [counts.index(n) for n in known]
        axes.errorbar(
            positions, values, yerr=[below, above], marker="o", capsize=3, label=f"{order_of(system)[0]} {system}"
        )
    axes.set_xticks(range(len(counts)), [str(n) for n in counts])
    axes.set_xlabel("adapters in use")
    axes.set_ylabel("requests/s (median; bars: all repeats)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=150)
    plt.close(figure)
