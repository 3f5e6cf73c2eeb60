"""Tables of the router: what a request costs, how long bodies hold it up, where requests are placed."""

from __future__ import annotations

import statistics
from operator import itemgetter
from typing import Any

from bench.evidence.cells import (
    Row,
    fixed,
    markdown,
    result,
)
from bench.measuring.report import QUIET_CORES

_AFFINITY = result("affinity-cpu.json")
_PLACEMENT = result("placement.json")
_ROUTER = result("router-relay-cpu.json")
_ROUTER_HOST = result("router-h100-host.json")
_PROTECTED = result("router-protected-cpu.json")  # there may be none
_ADMISSION = result("admission-cpu.json")

_ROUTER_GOALS = {
    "cpu_us_per_event": "the gateway's, aiming at 15 µs",
    "cpu_us_per_request": "400 µs",
    "added_first_event_ms_p50": "2 ms, 32 at a time",
    "added_first_event_ms_p99": "5 ms, 128 at a time",
    "added_spread_first_event_ms_p50": "2 ms, 32 at a time",
    "added_spread_first_event_ms_p99": "5 ms, 128 at a time",
}
_ROUTER_FIGURES = {
    "cpu_us_per_event": ("CPU per streamed event", "µs", 1),
    "cpu_us_per_request": ("CPU per short request, not streamed", "µs", 0),
    "added_first_event_ms_p50": ("added to the first event, p50", "ms", 1),
    "added_first_event_ms_p99": ("added to the first event, p99", "ms", 1),
    "added_spread_first_event_ms_p50": ("the same, streams that begin spread, p50", "ms", 1),
    "added_spread_first_event_ms_p99": ("the same, streams that begin spread, p99", "ms", 1),
}
_ROUTER_HEAD = ("medians", "Prelude's router", "SGLang's Rust gateway")


def router_cpu() -> str:
    """On two CPU cores, and on those of a GPU host."""
    keys = ("cpu_us_per_event", "cpu_us_per_request")
    head = (*_ROUTER_HEAD, "Prelude's, cores of a GPU host", "the gateway, there")
    there = [row[1:] for row in _router_rows(*keys, document=_ROUTER_HOST.document)]
    table = markdown(head, [(*here, *other) for here, other in zip(_router_rows(*keys), there, strict=True)])
    return (
        f"{table}\n\n{_ROUTER.machine}, commit `{_ROUTER.commit}`; a GPU host with {_ROUTER_HOST.machine}, commit "
        f"`{_ROUTER_HOST.commit}`; [the commands](bench/results/README.md)."
    )


def router_host() -> str:
    """Of a GPU host, with the times to the first event."""
    return markdown(_ROUTER_HEAD, _router_rows(*_ROUTER_FIGURES, document=_ROUTER_HOST.document))


def router() -> str:
    was_quiet = _was_quiet()
    keys = [key for key in _ROUTER_GOALS if was_quiet or key.startswith("cpu_")]  # else latencies mean nothing
    goals = [f"at most {_ROUTER_GOALS[key]}" for key in keys for _ in _ROUTER.document["ours"][key]]
    rows = [(*row, goal) for row, goal in zip(_router_rows(*keys), goals, strict=True)]
    return markdown((*_ROUTER_HEAD, "goal"), rows)


def _was_quiet() -> bool:
    """Whether nothing else used the cores in most repeats of each load of streams, so medians are of such repeats."""
    foreign_cores: dict[tuple[Any, ...], list[float]] = {}
    for each in filter(itemgetter("is_streaming"), _ROUTER.document["repeats"]):  # whose latencies are shown
        load = tuple(each[name] for name in ("system", "concurrency", "is_spread"))
        foreign_cores.setdefault(load, []).append(each["foreign_cores"])
    return all(statistics.median_high(found) <= QUIET_CORES for found in foreign_cores.values())


def protected() -> str:
    """What a router with keys, quotas and TLS takes, beside one without in the same run."""
    if not _PROTECTED.path.exists():
        return "No run is published yet."
    document, goals = _PROTECTED.document, {"cpu_us_per_event": "1.15", "cpu_us_per_request": "1.3"}
    ratios = document["over_ours"]["ours_protected"]
    rows = [
        (
            f"{text}, {concurrency} at a time",
            *(f"{fixed(document[system][key][concurrency], digits)} {unit}" for system in ("ours", "ours_protected")),
            fixed(ratio, 2),
            f"at most {goal}",
        )
        for key, goal in goals.items()
        for text, unit, digits in (_ROUTER_FIGURES[key],)
        for concurrency, ratio in ratios[key].items()
    ]
    source = f"{_PROTECTED.machine}, commit `{_PROTECTED.commit}`; ratios are medians of the repeats' own."
    return f"{markdown(('medians', 'without', 'keys, quotas and TLS', 'ratio', 'goal'), rows)}\n\n{source}"


def admission() -> str:
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
    return markdown(("body", "bytes", "status", "router", "engine's server"), rows)


def _router_rows(*keys: str, document: dict[str, Any] | None = None) -> list[Row]:
    """One for each figure and number of concurrent requests."""
    document = document or _ROUTER.document
    return [
        (
            f"{text}, {concurrency} at a time",
            *(f"{fixed(document[system][key][concurrency], digits)} {unit}" for system in ("ours", "sglang_router")),
        )
        for key in keys
        for text, unit, digits in (_ROUTER_FIGURES[key],)
        for concurrency in document["ours"][key]
    ]


def placement_scenarios() -> str:
    """Cold loads and p99 queue of every policy, by scenario."""
    rows = _PLACEMENT.document["rows"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells: dict[str, list[str]] = {}
    for row in rows:
        cell = f"{row['cold_loads']:,} · {1000 * row['queue_p99_s']:,.0f} ms · {row['balance']:.2f}"
        cells.setdefault(f"{row['scenario']} ({row['distinct_adapters']:,} adapters)", []).append(cell)
    header = ("cold loads · p99 queue · balance", *(policy.replace("_", " ") for policy in policies))
    return markdown(header, [(name, *values) for name, values in cells.items()])


def affinity() -> str:
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
    table = markdown(("placement", "cold loads of adapters in use", "TTFT p50", "TTFT p95", "requests/s"), cells)
    source = (
        f"{settings['num_workers']} unified workers of a tiny model, {settings['num_adapters']} adapters, "
        f"Zipf {settings['zipf']:g}, host memory for {settings['budget']} on each worker, {settings['num_requests']} "
        f"requests, {settings['concurrency']} at a time; one run, {_AFFINITY.machine}, commit `{_AFFINITY.commit}`."
    )
    return "\n".join((table, "", source))


def placement_cost() -> str:
    cost, cold_cost = _PLACEMENT.document["cost"], _PLACEMENT.document.get("cold_cost")
    undisturbed = ""
    if "undisturbed_p99_us" in cost:  # of results since it is measured
        undisturbed = f", {cost['undisturbed_p99_us']:.0f} µs (p99) where the core was not lost to another process"
    cold = ""
    if cold_cost is not None:  # of results since it is measured
        cold = (
            f". Under an adapter that is resident nowhere: {cold_cost['p50_us']:.0f} and {cold_cost['p99_us']:.0f} µs"
        )
    return (
        f"One placement among {cost['prefill_workers']} prefill and {cost['decode_workers']} decode workers with "
        f"{cost['resident_adapters']:,} resident adapters takes {cost['p50_us']:.0f} µs of CPU (p50) and "
        f"{cost['p99_us']:.0f} µs (p99){undisturbed}{cold}; {_PLACEMENT.machine}, commit `{_PLACEMENT.commit}`."
    )
