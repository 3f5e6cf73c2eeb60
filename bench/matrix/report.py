"""The report of a matrix in Markdown, made from its results file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from bench.load.compare import MIN_REPEATS
from bench.matrix.results import THROUGHPUT
from bench.measuring.contention import QUIET_CORES

_HEAD = ("system", "requests/s", "/ {to}", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed")
_EVEN_HEAD = ("workload", "system", "slowest n / fastest n", "slowest at n", "fastest at n")
_FEW_REQUESTS = 30  # in a load
_SHORT = 0.9  # of the time for which requests are due


class _Found:
    """Look-ups in the content of a file."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.figures = {(each["cell"], each["system"], each["name"]): each for each in found["figures"]}
        self.ratios = {(each["cell"], each["system"], each["name"]): each for each in found["ratios"]}
        self.cells = list(dict.fromkeys(each["cell"] for each in found["figures"]))
        self.systems = [
            name for name in found["settings"]["systems"] if any(name == each["system"] for each in found["figures"])
        ]

    def to(self, cell: str) -> str:
        """The system that ratios are to."""
        return next((each["to"] for each in self.found["ratios"] if each["cell"] == cell), "")

    def rows(self, cell: str) -> list[list[str]]:
        rows = []
        for system in self.systems:
            if (cell, system, THROUGHPUT) not in self.figures:
                continue
            loads = [each for each in self.found["loads"] if (each["cell"], each["system"]) == (cell, system)]
            failed = sum(each["summary"]["num_failed"] for each in loads)
            total = sum(each["summary"]["num_requests"] for each in loads)
            ratio = self.ratios.get((cell, system, THROUGHPUT))
            goodput = self.figures.get((cell, system, "goodput"))
            share = sum(each["summary"]["goodput"]["share"] for each in loads) / len(loads)
            rows.append(
                [
                    system,
                    with_interval(self.figures[cell, system, THROUGHPUT], "value"),
                    "" if ratio is None else with_interval(ratio, "ratio"),
                    "" if goodput is None else f"{_number(goodput['value'])} ({share:.0%})",
                    *(self._ms(cell, system, name) for name in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")),
                    f"{failed} of {total}",
                ]
            )
        return rows

    def _ms(self, cell: str, system: str, name: str) -> str:
        figure = self.figures.get((cell, system, name))
        return "" if figure is None else f"{_number(figure['value'])} ms"


def markdown(found: dict[str, Any]) -> str:
    """Tables with the conditions under them."""
    known = _Found(found)
    parts = []
    for cell in known.cells:
        head = [each.format(to=known.to(cell)) for each in _HEAD]
        parts += [f"**{cell}**", "", _table(head, known.rows(cell)), ""]
    if found["evenness"]:
        parts += [_table(_EVEN_HEAD, _even_rows(found)), ""]
    return "\n".join([*parts, *(f"- {each}" for each in notes(found))])


def notes(found: dict[str, Any]) -> list[str]:
    """What the numbers are, and what makes them doubtful."""
    settings, hardware = found["settings"], found["hardware"]
    limits = ", ".join(f"{key.upper()} {limit:g} ms" for key, limit in settings["slo_ms"].items())
    sizes = settings["model_sizes"]
    lines = [
        f"model {settings['model']} (hidden {sizes['hidden']}, {sizes['num_layers']} layers, {sizes['dtype']}, random "
        f"weights), LoRA rank {settings['lora_rank']} on seven projections, {_more_settings(settings)}"
        f"{settings['slots']} slots; our systems "
        f"{'with a router' if settings['through'] == 'router' else 'without a router, as the others'}",
        f"{_lengths(found)}; {settings['repeats']} repeats, all systems in turn, there and back; figures are means over"
        f" the repeats, in brackets {_intervals(settings['repeats'])}",
        f"goodput: requests within {limits}, failed ones included in the share",
        *(f"{name}: {text}" for name, text in settings["systems"].items()),
        f"{hardware['cpu']}{_vectors(hardware)}, {hardware['cores']} cores, GPU: {hardware['gpu']}, "
        f"{settings['gpus']} per system; commit {found['commit']}",
        f"`{found['command']}`",
    ]
    if spread := repeat_spread(found["loads"]):
        lines.append(f"repeats differ most in {spread}")
    if offered := _offered(found["loads"]):
        lines.append(f"at a rate that was given, so that requests/s is what came where a system keeps up: {offered}")
    if settings["device"] == "cpu":
        lines.append("on a CPU all engines share the same cores, both of a pair, too")
    few = _shares(found["loads"], lambda load: load["summary"]["num_requests"] < _FEW_REQUESTS)
    if few:
        lines.append(
            f"FEW: less than {_FEW_REQUESTS} requests in loads of {few}, so percentiles say little there; a longer "
            "--duration-s has more"
        )
    noisy = [each["foreign_cores"] for each in found["loads"] if each["foreign_cores"] > QUIET_CORES]
    if noisy:
        lines.append(
            f"NOT QUIET: during {len(noisy)} of {len(found['loads'])} loads other processes kept more than "
            f"{QUIET_CORES} cores busy (at most {max(noisy):.1f}); run it again on a quiet machine"
        )
    busy = [each["generator"]["cpu_share"] for each in found["loads"] if each["generator"]["cpu_share"] > 0.7]
    if busy:
        lines.append(f"in {len(busy)} loads the load generator was busy for up to {max(busy):.0%} of the time")
    return lines


def _more_settings(settings: dict[str, Any]) -> str:
    """What is not so in every run."""
    reft = f"DiReFT rank {settings['reft_rank']} on every layer, " if "unified_direft" in settings["systems"] else ""
    host = f"host memory for {settings['host_adapters']} adapters, " if settings.get("host_adapters") else ""
    ranks = f"{settings['tensor_parallel']} GPUs per engine, " if settings.get("tensor_parallel", 1) > 1 else ""
    return reft + host + ranks


def _vectors(hardware: dict[str, Any]) -> str:
    return f" ({hardware['vectors']})" if "vectors" in hardware else ""  # results from before have none


def _lengths(found: dict[str, Any]) -> str:
    """How long requests were due, and how long the loads lasted: longer with their tails, shorter with gaps."""
    due_s, loads = found["settings"]["duration_s"], found["loads"]
    lasted = [each["summary"]["duration_s"] for each in loads]
    text = f"requests are due for {due_s:g} s; loads lasted {min(lasted):.1f} to {max(lasted):.1f} s, tails included"
    short = _shares(loads, lambda load: load["summary"]["duration_s"] < _SHORT * due_s)
    return f"{text}, and less than {_SHORT * due_s:g} s in {short}, where no more came" if short else text


def _intervals(repeats: int) -> str:
    if repeats >= MIN_REPEATS:
        return "95 % intervals"
    return (
        "95 % intervals of what varies within loads: so few repeats do not show how much one differs from another, "
        "which may be more"
    )


def repeat_spread(loads: Sequence[dict[str, Any]]) -> str:
    """Where repeats lie furthest apart: `punica, n = 32, pair: 8.50 and 10.0 requests/s`; empty without repeats."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for load in loads:
        rates[load["cell"], load["system"]].append(load["summary"]["requests_per_s"])
    apart = {key: (min(found), max(found)) for key, found in rates.items() if len(found) > 1}
    if not apart:
        return ""
    (cell, system), (low, high) = min(apart.items(), key=lambda each: each[1][0] / (each[1][1] or 1))
    return f"{cell}, {system}: {_number(low)} and {_number(high)} requests/s"


def _offered(loads: Sequence[dict[str, Any]]) -> str:
    """Cells in an open loop, with their rates: `chat, n = 64 (4/s)`."""
    rates = {each["cell"]: each["settings"]["requests_per_s"] for each in loads}
    return "; ".join(f"{cell} ({rate:g}/s)" for cell, rate in rates.items() if rate is not None)


def _shares(loads: Sequence[dict[str, Any]], is_meant: Callable[[dict[str, Any]], bool]) -> str:
    """Cells with such loads and how many: `punica, n = 32 (2 of 8)`; empty if there are none."""
    cells = Counter(each["cell"] for each in loads)
    meant = Counter(each["cell"] for each in loads if is_meant(each))
    return "; ".join(f"{cell} ({count} of {cells[cell]})" for cell, count in meant.items())


def _even_rows(found: dict[str, Any]) -> list[list[str]]:
    return [
        [
            each["workload"],
            each["system"],
            f"{each['worst_over_best']:.2f}",
            str(each["worst_at"]),
            str(each["best_at"]),
        ]
        for each in found["evenness"]
    ]


def with_interval(each: dict[str, Any], key: str) -> str:
    """A figure's value or ratio, with its ends in brackets if it has an interval."""
    value = f"{each[key]:.2f}" if key == "ratio" else _number(each[key])
    if each["low"] is None:
        return value
    ends = (f"{each[end]:.2f}" if key == "ratio" else _number(each[end]) for end in ("low", "high"))
    return f"{value} [{' to '.join(ends)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
