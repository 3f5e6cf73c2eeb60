"""Write the measured tables of the pages from bench/results/: `python -m bench.evidence`.

A page marks the place of a table with the comments `<!-- table NAME -->` and `<!-- end -->`; what stands between them
is generated. Tables hold numbers only: what they mean, and what they do not show, is the page's own text.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from bench.measuring.report import QUIET_CORES, Ratio
from bench.measuring.result_file import ResultFile

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = ("README.md", "docs/evidence.md", "docs/placement.md", "bench/results/README.md")

_BLOCK = re.compile(r"<!-- table ([a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)

_LLAMA = ResultFile(RESULTS / "adapter-tax-h200-llama-3.1-8b-rank16-unified.json")
_LLAMA_STOCK = ResultFile(RESULTS / "adapter-tax-h200-llama-3.1-8b-rank16-stock.json")
_LLAMA_BEFORE = ResultFile(RESULTS / "adapter-tax-h200-llama-3.1-8b-rank16-before.json")
_LLAMA_SGLANG_KERNELS = ResultFile(RESULTS / "adapter-tax-h200-llama-3.1-8b-rank16-sglang-kernels.json")
_LLAMA_RANK1 = ResultFile(RESULTS / "adapter-tax-h200-llama-3.1-8b-rank1-n512.json")
_QWEN = ResultFile(RESULTS / "adapter-tax-h200-qwen2.5-0.5b-rank16.json")
_TINY = ResultFile(RESULTS / "adapter-tax-cpu.json")
_COLD = ResultFile(RESULTS / "cold-load-cpu.json")
_COLD_SLOW_STORE = ResultFile(RESULTS / "cold-load-cpu-slow-store.json")
_COLD_H200 = ResultFile(RESULTS / "cold-load-h200.json")
_SLOTS_H200 = ResultFile(RESULTS / "slots-h200-llama-3.1-8b-rank16.json")
_AFFINITY = ResultFile(RESULTS / "affinity-cpu.json")
_PLACEMENT = ResultFile(RESULTS / "placement.json")
_CATALOGS = {"SQLite": ResultFile(RESULTS / "catalog-sqlite.json")}
_CATALOGS["PostgreSQL"] = ResultFile(RESULTS / "catalog-postgresql.json")

_ROUTER = ResultFile(RESULTS / "router-relay-cpu.json")
_ADMISSION = ResultFile(RESULTS / "admission-cpu.json")

_COMMAND_WIDTH = 100
_GPU_COUNTS = (1, 8, 32, 128, 512)  # adapters in use
_CPU_COUNTS = (1, 8, 32, 64)

Row = Sequence[str]


def main() -> None:
    """Rewrite the pages and name those that changed."""
    for name in PAGES:
        before = (ROOT / name).read_text()
        after = rendered(before)
        if after != before:
            (ROOT / name).write_text(after)
            print(f"{name} updated", file=sys.stderr)


def rendered(page: str) -> str:
    """The page with every table as the results give it. Raises KeyError for a table that nothing generates."""
    return _BLOCK.sub(lambda match: f"<!-- table {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->", page)


def tables_in(page: str) -> list[str]:
    """The names of a page's tables."""
    return [match[1] for match in _BLOCK.finditer(page)]


# ---- one H200 -------------------------------------------------------------------------------------------------------


def _speed() -> str:
    rows = [
        ("no adapters", *_rates(_LLAMA, "none")),
        ("Prelude, LoRA rank 16", *_rates_and_ratios(_LLAMA, "unified_lora")),
        ("Prelude, DiReFT rank 8", *_rates_and_ratios(_LLAMA, "unified_direft")),
        ("stock SGLang multi-LoRA, rank 16", *_rates_and_ratios(_LLAMA_STOCK, "stock")),
    ]
    source = f"One {_LLAMA.machine}, commit `{_LLAMA.commit}`:"
    table = _markdown(("Llama-3.1-8B's sizes, requests/s", *_columns(_GPU_COUNTS)), rows)
    return "\n".join((table, "", source, "", "```sh", _wrapped(_LLAMA.command), "```"))


def _h200_requests() -> str:
    rows = [
        ("8B: no adapters", *_rates(_LLAMA, "none")),
        ("8B: Prelude, LoRA rank 16", *_rates(_LLAMA, "unified_lora")),
        ("8B: Prelude, DiReFT rank 8", *_rates(_LLAMA, "unified_direft")),
        ("8B, second run: no adapters", *_rates(_LLAMA_STOCK, "none")),
        ("8B, second run: stock SGLang multi-LoRA, rank 16", *_rates(_LLAMA_STOCK, "stock")),
        ("0.5B: no adapters", *_rates(_QWEN, "none")),
        ("0.5B: Prelude, LoRA rank 16", *_rates(_QWEN, "unified_lora")),
        ("0.5B: Prelude, DiReFT rank 8", *_rates(_QWEN, "unified_direft")),
        ("0.5B: stock SGLang multi-LoRA, rank 16", *_rates(_QWEN, "stock")),
    ]
    return _markdown(("requests/s", *_columns(_GPU_COUNTS)), rows)


def _h200_ratios() -> str:
    lora, over_stock = _ratios(_LLAMA, "unified_lora", "none"), _ratios(_LLAMA_STOCK, "none", "stock")
    lora_over_stock = [one * other for one, other in zip(lora, over_stock, strict=True)]
    rows = [
        ("8B: LoRA / no adapters", *_texts(lora), "0.97"),
        ("8B: DiReFT / no adapters", *_texts(_ratios(_LLAMA, "unified_direft", "none")), "0.97"),
        ("8B: no adapters / stock: the upper bound of the next row", *_texts(over_stock), ""),
        ("8B: LoRA / stock, of two runs: the first row times the third", *_texts(lora_over_stock), "2.5 at n = 512"),
        ("0.5B: LoRA / no adapters", *_texts(_ratios(_QWEN, "unified_lora", "none")), "0.97"),
        ("0.5B: DiReFT / no adapters", *_texts(_ratios(_QWEN, "unified_direft", "none")), "0.97"),
        ("0.5B: no adapters / stock: the upper bound of the next row", *_texts(_ratios(_QWEN, "none", "stock")), ""),
        ("0.5B: LoRA / stock", *_texts(_ratios(_QWEN, "unified_lora", "stock")), "2.5 at n = 512"),
    ]
    return _markdown(("ratios of requests/s", *_columns(_GPU_COUNTS), "goal"), rows)


def _h200_latencies() -> str:
    rows = [
        (f"{model}: {kind}", *_texts(_latency_ratios(file, system)))
        for model, file in (("8B", _LLAMA), ("0.5B", _QWEN))
        for kind, system in (("LoRA", "unified_lora"), ("DiReFT", "unified_direft"))
    ]
    return _markdown(("median latency without adapters / with", *_columns(_GPU_COUNTS)), rows)


def _h200_rank1() -> str:
    systems = {"none": "no adapters", "stock": "stock SGLang multi-LoRA, rank 1"}
    systems |= {"unified_lora": "Prelude, LoRA rank 1", "unified_direft": "Prelude, DiReFT rank 8"}
    rows = [
        (
            text,
            *_rates(_LLAMA_RANK1, system, (512,)),
            *_texts(_ratios(_LLAMA_RANK1, system, "none", (512,))),
            *_texts(_ratios(_LLAMA_RANK1, system, "stock", (512,))),
        )
        for system, text in systems.items()
    ]
    return _markdown(("8B, n = 512", "requests/s", "/ no adapters", "/ stock"), rows)


def _h200_history() -> str:
    counts = (1, 8, 32, 128)
    runs = {
        "SGLang's LoRA kernels, 128 slots": _LLAMA_SGLANG_KERNELS,
        "Prelude's expand kernel, 128 slots": _LLAMA_BEFORE,
        "Prelude's expand kernel, 512 slots": _LLAMA,
    }
    rows = [
        (text, f"`{file.commit}`", *_texts(file.document["ratios"]["c/a"][str(n)] for n in counts))
        for text, file in runs.items()
    ]
    return _markdown(("8B, LoRA rank 16 / no adapters", "commit", *_columns(counts)), rows)


# ---- two CPU cores --------------------------------------------------------------------------------------------------


def _cpu_requests() -> str:
    counts = (0, *_CPU_COUNTS)
    systems = {
        "none": "no adapters",
        "stock": "stock SGLang multi-LoRA",
        "unified_lora": "Prelude, LoRA, unified worker",
        "unified_direft": "Prelude, DiReFT, unified worker",
        "pd": "Prelude, LoRA, prefill/decode pair",
    }
    rows = [(text, *_rates(_TINY, system, counts)) for system, text in systems.items()]
    return _markdown(("requests/s, medians", *_columns(counts)), rows)


def _cpu_ratios() -> str:
    lines = (
        ("LoRA / no adapters", Ratio("c/a", "unified_lora", "none"), "0.90"),
        ("DiReFT / no adapters", Ratio("d/a", "unified_direft", "none"), "0.95"),
        ("no adapters / stock: the upper bound of the next row", Ratio("a/b", "none", "stock"), ""),
        ("LoRA / stock", Ratio("c/b", "unified_lora", "stock"), "4 at n = 32"),
        ("a pair with n adapters / the same pair without", Ratio("e(n)/e(0)", "pd", "pd", 0), "0.97 at n = 64"),
        ("no adapters at n / at 0: the same requests, so drift", Ratio("a(n)/a(0)", "none", "none", 0), ""),
    )
    measurements = _TINY.measurements
    rows = [
        (text, *_texts(value for n in _CPU_COUNTS if (value := ratio.at(measurements, n)) is not None), goal)
        for text, ratio, goal in lines
    ]
    return _markdown(("median of the repeats' ratios", *_columns(_CPU_COUNTS), "goal"), rows)


def _cold_loads() -> str:
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
    files = (_COLD, _COLD_SLOW_STORE, _COLD_H200)
    rows = [
        (text, *(_fixed(file.document[key], digits) + unit if key in file.document else "" for file in files), goal)
        for text, key, digits, unit, goal in lines
    ]
    delay_ms = _COLD_SLOW_STORE.document["settings"]["store_delay_ms"]
    header = ("medians of three repeats", "folder", f"S3, answers after {delay_ms:.0f} ms", "H200, 16 cores", "goal")
    return _markdown(header, rows)


def _slots_h200() -> str:
    settings = _SLOTS_H200.document["settings"]
    rows = [
        (
            f"{row['adapters']} adapters, {settings['slots']} slots",
            f"{row['requests_per_s']:.1f}",
            f"{row['first_token_p50_ms']:.0f} ms",
            f"{row['first_token_p95_ms']:.0f} ms",
            f"{row['fills']:.0f}",
        )
        for row in _SLOTS_H200.document["medians"]
    ]
    return _markdown(("medians of two loads", "requests/s", "TTFT p50", "TTFT p95", "slot fills"), rows)


def _catalog() -> str:
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
                f"{_fixed(file.document[f'{key}_{quantile}_{unit}'], digits)} {unit.replace('u', 'µ')}"
                for file in _CATALOGS.values()
                for quantile in ("p50", "p99")
            ),
            goal,
        )
        for text, key, unit, digits, goal in lines
    ]
    heads = [f"{name} {quantile}" for name in _CATALOGS for quantile in ("p50", "p99")]
    return _markdown(("1,000,000 revisions", *heads, "goal"), rows)


_ROUTER_GOALS = {
    "cpu_us_per_event": "the gateway's, aiming at 15 µs",
    "cpu_us_per_request": "400 µs",
    "added_first_event_ms_p50": "2 ms, 32 at a time",
    "added_first_event_ms_p99": "5 ms, 128 at a time",
}
_ROUTER_FIGURES = {
    "cpu_us_per_event": ("CPU per streamed event", "µs", 1),
    "cpu_us_per_request": ("CPU per short request, not streamed", "µs", 0),
    "added_first_event_ms_p50": ("added to the first event, p50", "ms", 1),
    "added_first_event_ms_p99": ("added to the first event, p99", "ms", 1),
}
_ROUTER_HEAD = ("medians", "Prelude's router", "SGLang's Rust gateway")


def _router_cpu() -> str:
    return _markdown(_ROUTER_HEAD, _router_rows("cpu_us_per_event", "cpu_us_per_request"))


def _router() -> str:
    is_quiet = max(each["foreign_cores"] for each in _ROUTER.document["repeats"]) <= QUIET_CORES
    keys = [key for key in _ROUTER_FIGURES if is_quiet or key.startswith("cpu_")]  # else latencies mean nothing
    goals = [f"at most {_ROUTER_GOALS[key]}" for key in keys for _ in _ROUTER.document["ours"][key]]
    rows = [(*row, goal) for row, goal in zip(_router_rows(*keys), goals, strict=True)]
    return _markdown((*_ROUTER_HEAD, "goal"), rows)


def _admission() -> str:
    """The longest stops of the loops by body, and where an engine was behind the router, that of its server."""
    rows = [
        (
            row["body"],
            f"{row['num_bytes']:,}",
            "/".join(map(str, row["status"])),
            f"{row['router_ms']:.0f} ms",
            "" if row["engine_ms"] is None else f"{row['engine_ms']:.0f} ms",
        )
        for row in _ADMISSION.document["bodies"]
    ]
    return _markdown(("body", "bytes", "status", "router", "engine's server"), rows)


def _router_rows(*keys: str) -> list[Row]:
    """One for each figure and number of concurrent requests."""
    document = _ROUTER.document
    return [
        (
            f"{text}, {concurrency} at a time",
            *(f"{_fixed(document[system][key][concurrency], digits)} {unit}" for system in ("ours", "sglang_router")),
        )
        for key in keys
        for text, unit, digits in (_ROUTER_FIGURES[key],)
        for concurrency in document["ours"][key]
    ]


# ---- where numbers come from ----------------------------------------------------------------------------------------


def _sources() -> str:
    lines = ["```sh"]
    for file in map(ResultFile, sorted(RESULTS.glob("*.json"))):
        lines += [f"# {file.path.name}: {file.machine}, commit {file.commit}", _wrapped(file.command), ""]
    return "\n".join((*lines[:-1], "```"))


def _placement_scenarios() -> str:
    """Cold loads and p99 queue of every policy, by scenario."""
    rows = _PLACEMENT.document["rows"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells: dict[str, list[str]] = {}
    for row in rows:
        cell = f"{row['cold_loads']:,} · {1000 * row['queue_p99_s']:,.0f} ms · {row['balance']:.2f}"
        cells.setdefault(f"{row['scenario']} ({row['distinct_adapters']:,} adapters)", []).append(cell)
    header = ("cold loads · p99 queue · balance", *(policy.replace("_", " ") for policy in policies))
    return _markdown(header, [(name, *values) for name, values in cells.items()])


def _affinity() -> str:
    settings, rows = _AFFINITY.document["settings"], _AFFINITY.document["rows"]
    cells = [
        (
            row["policy"].replace("_", " "),
            f"{row['cold_loads']} of {row['distinct_adapters']} ({row['cold_loads_per_adapter']:.2f} each)",
            f"{row['first_token_p50_ms']:.0f} ms",
            f"{row['first_token_p95_ms']:.0f} ms",
            f"{row['requests_per_s']:.1f}",
        )
        for row in rows
    ]
    table = _markdown(("placement", "cold loads of adapters in use", "TTFT p50", "TTFT p95", "requests/s"), cells)
    source = (
        f"{settings['num_workers']} unified workers of a tiny model, {settings['num_adapters']} adapters, "
        f"Zipf {settings['zipf']:g}, host memory for {settings['budget']} on each worker, {settings['num_requests']} "
        f"requests, {settings['concurrency']} at a time; one run, {_AFFINITY.machine}, commit `{_AFFINITY.commit}`."
    )
    return "\n".join((table, "", source))


def _placement_cost() -> str:
    cost = _PLACEMENT.document["cost"]
    return (
        f"One placement among {cost['prefill_workers']} prefill and {cost['decode_workers']} decode workers with "
        f"{cost['resident_adapters']:,} resident adapters takes {cost['p50_us']:.0f} µs of CPU (p50) and "
        f"{cost['p99_us']:.0f} µs (p99); {_PLACEMENT.machine}, commit `{_PLACEMENT.commit}`."
    )


TABLES: dict[str, Callable[[], str]] = {
    "speed": _speed,
    "h200-requests": _h200_requests,
    "h200-ratios": _h200_ratios,
    "h200-latencies": _h200_latencies,
    "h200-rank1": _h200_rank1,
    "h200-history": _h200_history,
    "cpu-requests": _cpu_requests,
    "cpu-ratios": _cpu_ratios,
    "cold-loads": _cold_loads,
    "slots-h200": _slots_h200,
    "catalog": _catalog,
    "placement": _placement_scenarios,
    "placement-cost": _placement_cost,
    "affinity": _affinity,
    "router-cpu": _router_cpu,
    "router": _router,
    "admission": _admission,
    "sources": _sources,
}

# ---- cells ----------------------------------------------------------------------------------------------------------


def _rates(file: ResultFile, system: str, counts: Sequence[int] = _GPU_COUNTS) -> list[str]:
    """Requests/s with three digits; empty where they were not measured."""
    rates = [file.rate(system, n) for n in counts]
    return ["" if rate is None else _fixed(rate, 0 if rate >= 99.95 else 1) for rate in rates]


def _rates_and_ratios(file: ResultFile, system: str) -> list[str]:
    """Requests/s, in parentheses relative to no adapters in the same run."""
    ratios = _texts(_ratios(file, system, "none"))
    return [f"{rate} ({ratio})" for rate, ratio in zip(_rates(file, system), ratios, strict=True)]


def _ratios(file: ResultFile, system: str, to: str, counts: Sequence[int] = _GPU_COUNTS) -> list[float]:
    return [_quotient(file.rate(system, n), file.rate(to, n)) for n in counts]


def _latency_ratios(file: ResultFile, system: str) -> list[float]:
    return [_quotient(file.latency_s("none", n), file.latency_s(system, n)) for n in _GPU_COUNTS]


def _quotient(of: float | None, to: float | None) -> float:
    assert of is not None
    assert to is not None
    return of / to


def _texts(values: Iterable[float]) -> list[str]:
    return [_fixed(value, 2) for value in values]


def _fixed(value: float, num_digits: int) -> str:
    """Rounded half up from the digits that the file has."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-num_digits), ROUND_HALF_UP))


def _wrapped(command: str) -> str:
    """A command over several lines, as a shell takes it; an option's value stays beside it."""
    parts: list[str] = []
    for word in shlex.split(command):
        quoted = shlex.quote(word)
        if word.startswith("--") or not parts:
            parts.append(quoted)
        else:
            parts[-1] += f" {quoted}"
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < _COMMAND_WIDTH:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {part}")
    return "\n".join(lines)


def _columns(counts: Sequence[int]) -> list[str]:
    return [f"n = {counts[0]}", *(str(n) for n in counts[1:])]


def _markdown(head: Row, rows: Iterable[Row]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    main()
