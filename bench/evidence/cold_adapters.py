"""Tables of adapters that are not in a slot, in memory or in a cache: loads, slot fills, names."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from bench.evidence.cells import (
    fixed,
    markdown,
    result,
)
from bench.matrix.report import repeat_spread
from bench.matrix.results import THROUGHPUT

_COLD = result("cold-load-cpu.json")
_COLD_SLOW_STORE = result("cold-load-cpu-slow-store.json")
_COLD_H100 = result("cold-load-h100.json")
_COLD_H100_BESIDE = result("cold-load-h100-digest-beside.json")
_COLD_H100_8B = result("cold-load-h100-llama-3.1-8b.json")
_COLD_H100_NO_WAIT = result("cold-load-h100-no-wait.json")
_COLD_H100_8B_NO_WAIT = result("cold-load-h100-llama-3.1-8b-no-wait.json")
_PIONEER_PAIR = result("matrix-pioneer-h100x2-pair.json")
_SLOTS = {"H200": result("slots-h200-llama-3.1-8b-rank16.json"), "H100": result("slots-h100-llama-3.1-8b-rank16.json")}
_PIONEER_H200 = result("matrix-pioneer-h200-llama-3.1-8b.json")
_HOST_MEMORY_H200 = result("host-memory-h200-llama-3.1-8b-rank16.json")
_CATALOGS = {"SQLite": result("catalog-sqlite.json")}
_CATALOGS["PostgreSQL"] = result("catalog-postgresql.json")


def cold_loads() -> str:
    lines = (
        ("the engine's part of a load: PEFT file", "loader_peft_ms", 1, " ms", ""),
        ("the engine's part of a load: packed file", "loader_packed_ms", 2, " ms", ""),
        ("PEFT file / packed file", "loader_speedup", 1, "", "at least 10"),
        ("filling a slot from a packed file", "loader_packed_to_slot_ms", 1, " ms", ""),
        ("one cold adapter: ready after", "one_cold_ms", 0, " ms", ""),
        ("sixteen at once: the last one ready after", "last_of_many_ms", 0, " ms", ""),
        ("sixteen at once / one", "sixteen_over_one", 1, "", "at most 3"),
        ("p95 of first tokens: all adapters resident", "resident_first_token_p95_ms", 0, " ms", ""),
        ("p95 of first tokens: the same, 64 cold ones arriving", "resident_first_token_p95_with_cold_ms", 0, " ms", ""),
        ("cold arrivals / all resident", "resident_first_token_p95_ratio", 2, "", "at most 1.25"),
        ("requests/s: 32 adapters, memory for 32", "all_resident_requests_per_s", 1, "", ""),
        ("requests/s: 128 adapters in turn, memory for 32", "overcommit_requests_per_s", 1, "", ""),
        ("128 adapters / 32 adapters", "overcommit_throughput_ratio", 2, "", "at least 0.8"),
    )
    small = (_COLD, _COLD_SLOW_STORE, _COLD_H100, _COLD_H100_NO_WAIT, _COLD_H100_BESIDE)
    files = (*small, _COLD_H100_8B, _COLD_H100_8B_NO_WAIT)
    rows = [
        (text, *(fixed(file.document[key], digits) + unit if key in file.document else "" for file in files), goal)
        for text, key, digits, unit, goal in lines
    ]
    delay_ms = _COLD_SLOW_STORE.document["settings"]["store_delay_ms"]
    slow = f"S3, answers after {delay_ms:.0f} ms"
    machines = ("H100, 16 cores", "H100, 64 cores")
    last = "H100, 16 cores, digest beside the copy"
    header = (
        "medians of three repeats",
        "folder",
        slow,
        *machines,
        last,
        *(f"8B: {each}" for each in machines),
        "goal",
    )
    return markdown(header, rows)


def pioneer_pair() -> str:
    """The figures of each number of adapters, and the second number's over the first's."""
    digits = {THROUGHPUT: 1, "TTFT p50": 0, "TTFT p90": 0, "TTFT p99": 0, "TPOT p50": 1}
    figures = {(each["cell"], each["name"]): each for each in _PIONEER_PAIR.document["figures"]}
    first, last = cells = _PIONEER_PAIR.document["settings"]["cells"]
    rows = [(cell, *(_measured(figures[cell, name], digits[name]) for name in digits)) for cell in cells]
    ratios = (figures[last, name]["value"] / figures[first, name]["value"] for name in digits)
    return markdown(("", "requests/s", *list(digits)[1:]), [*rows, ("ratio", *(fixed(each, 2) for each in ratios))])


def _measured(figure: dict[str, Any], digits: int) -> str:
    value = fixed(figure["value"], digits)
    return f"{value} ms" if figure["unit"] == "ms" else value


def pioneer_h200() -> str:
    """Means of the loads of each number of adapters: that run was cut short, so it has no figures of its own."""
    loads = _PIONEER_H200.document["loads"]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for load in loads:
        found.setdefault(load["cell"], {}).setdefault(load["system"], []).append(load["summary"])
    systems = list(dict.fromkeys(load["system"] for load in loads))
    rates = {
        cell: {name: fmean(each["requests_per_s"] for each in by_system[name]) for name in systems}
        for cell, by_system in found.items()
    }
    rows = [
        (
            cell,
            *(
                f"{rates[cell][name]:.1f} ({rates[cell][name] / rates[cell]['none']:.2f}) · "
                f"{fmean(each['ttft_ms']['p50'] for each in by_system[name]):.0f} ms · "
                f"{fmean(each['goodput']['share'] for each in by_system[name]):.0%}"
                for name in systems
            ),
        )
        for cell, by_system in found.items()
    ]
    even = (min(rate[name] for rate in rates.values()) / max(rate[name] for rate in rates.values()) for name in systems)
    rows.append(("slowest / fastest n", *(f"{each:.2f}" for each in even)))
    return markdown(("requests/s (/ none) · TTFT p50 · within 500 and 50 ms", *systems), rows)


def slots() -> str:
    rows = [
        (
            f"{gpu}: {row['adapters']} adapters, {file.document['settings']['slots']} slots",
            f"{row['requests_per_s']:.1f}",
            f"{row['first_token_p50_ms']:.0f} ms",
            f"{row['first_token_p95_ms']:.0f} ms",
            f"{row['fills']:.0f}",
            f"{sum(each['adapters'] == row['adapters'] for each in file.document['rows'])}",
        )
        for gpu, file in _SLOTS.items()
        for row in file.document["medians"]
    ]
    return markdown(("medians", "requests/s", "TTFT p50", "TTFT p95", "slot fills", "loads"), rows)


def host_memory_h200() -> str:
    names = {"pair": "a pair, two GPUs", "unified": "a unified worker, one GPU"}
    rows = [
        (
            f"{names[row['layout']]}: {row['adapters']} adapters",
            f"{row['requests_per_s']:.1f}",
            fixed(row["ratio"], 2),
            f"{row['first_token_p50_ms']:.0f} ms",
            f"{row['first_token_p95_ms']:.0f} ms",
            f"{row['loads']:.0f}",
            "at least 0.8" if row["ratio"] != 1 else "",
        )
        for row in _HOST_MEMORY_H200.document["medians"]
    ]
    room = _HOST_MEMORY_H200.document["settings"]["room"]
    header = (
        f"medians of two loads, memory for {room}",
        "requests/s",
        "ratio",
        "TTFT p50",
        "TTFT p95",
        "loads",
        "goal",
    )
    return markdown(header, rows)


def catalog() -> str:
    lines = (
        ("resolving a name by SQL", "resolve_sql", "ms", 2, "1 ms at p99"),
        ("resolving a name from a router's memory", "resolve_cached", "us", 1, "20 µs at p99"),
        ("a page of a listing", "list_page", "ms", 1, ""),
        ("an import's row, durable", "import", "ms", 1, ""),
    )
    rows = [
        (
            text,
            *(
                f"{fixed(file.document[f'{key}_{quantile}_{unit}'], digits)} {unit.replace('u', 'µ')}"
                for file in _CATALOGS.values()
                for quantile in ("p50", "p99")
            ),
            goal,
        )
        for text, key, unit, digits, goal in lines
    ]
    heads = [f"{name} {quantile}" for name in _CATALOGS for quantile in ("p50", "p99")]
    return markdown(("1,000,000 revisions", *heads, "goal"), rows)


_PUNICA = {
    "identical": "identical",
    "uniform": "uniform",
    "zipf": "zipf",
    "distinct, 32 adapters": "distinct",
    "distinct, 256 adapters, a slow machine": "distinct-256",
}


def punica() -> str:
    """Punica's four distributions of adapters: requests/s of each system, relative to no adapters, and TPOT p50."""
    systems = ("none", "stock", "unified", "pair")
    rows, sources = [], []
    for distribution, name in _PUNICA.items():
        file = result(f"matrix-punica-{name}-cpu.json")
        spread = repeat_spread(file.document["loads"])
        sources.append(f"- {distribution}: {file.machine}, commit `{file.commit}`; repeats differ most in {spread}")
        figures = file.document["figures"]
        found = {(each["system"], each["name"]): float(each["value"]) for each in figures}
        rates = [found[system, "answered"] for system in systems]
        paces = [found[system, "TPOT p50"] for system in systems]
        rows.append(
            [distribution]
            + [f"{rate:.2f} ({rate / rates[0]:.2f}) · {pace:.0f} ms" for rate, pace in zip(rates, paces, strict=True)]
        )
    table = markdown(("punica: requests/s (/ none) · TPOT p50", *systems), rows)
    return "\n".join((table, "", *sources))
