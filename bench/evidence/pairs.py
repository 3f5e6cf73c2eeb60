"""Tables of a prefill/decode pair beside two unified workers on the same two GPUs, each a cluster with its router."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.evidence.cells import fixed, markdown, result

_SYSTEMS = {"pair": "a pair", "unified": "two unified workers"}
_GOODPUT = {name: result(f"goodput-h100x2-{name}.json") for name in _SYSTEMS}
_EARLIER_PAIR = result("sweep-h100x2-pair.json")
_OVERLOADED_MS = 2000.0  # TTFT p99
_PROMPT_TOKENS = (512, 4096)
_FIRST_TOKENS = {
    (name, length): result(f"first-token-h100x2-{name}-{length}.json") for name in _SYSTEMS for length in _PROMPT_TOKENS
}


def goodput() -> str:
    """The highest rate at which 99 % of the requests meet both objectives, and the next one that was tried."""
    rows = [
        _held(_SYSTEMS[name], file.commit, sweep)
        for name, file in _GOODPUT.items()
        for sweep in sorted(file.document["rows"], key=lambda sweep: float(sweep["slo_ms"]["tpot"]))
    ]
    rows.insert(0, _held("a pair, an earlier run", _EARLIER_PAIR.commit, _EARLIER_PAIR.document))
    header = (
        "2048 + 128 tokens", "commit", "objectives: TTFT, TPOT", "requests/s held", "TTFT p50, p99", "TPOT p50, p99",
        "within at the next rate",
    )  # fmt: skip
    return markdown(header, rows)


def _held(system: str, commit: str, sweep: dict[str, Any]) -> tuple[str, ...]:
    probes = sorted(sweep["probes"], key=lambda each: float(each["requests_per_s"]))
    best = sweep["best_requests_per_s"]
    held = next(each for each in probes if each["requests_per_s"] == best)
    missed = next(each for each in probes if each["requests_per_s"] > best)
    slo_ms = sweep["slo_ms"]
    next_rate = f"{fixed(missed['requests_per_s'], 1)}: {missed['share']:.0%}"
    objectives = f"{slo_ms['ttft'] / 1000:g} s, {slo_ms['tpot']:g} ms"
    return (system, f"`{commit}`", objectives, fixed(best, 1), *_latencies(held), next_rate)


def tpot_by_rate() -> str:
    """TPOT of every rate that was tried and not overloaded, to see from which objective on a pair is ahead."""
    rows = []
    for name, text in _SYSTEMS.items():
        probes = {each["requests_per_s"]: each for sweep in _GOODPUT[name].document["rows"] for each in sweep["probes"]}
        for rate, probe in sorted(probes.items()):
            if probe["summary"]["ttft_ms"]["p99"] < _OVERLOADED_MS:
                rows.append((text, fixed(rate, 1), *_latencies(probe)))
    return markdown(("", "requests/s", "TTFT p50, p99", "TPOT p50, p99"), rows)


def first_tokens() -> str:
    rows = []
    for length in _PROMPT_TOKENS:
        of = {name: _first_token_ms(_FIRST_TOKENS[name, length].document) for name in _SYSTEMS}
        more = of["pair"] - of["unified"]
        goal = "5 ms" if length == _PROMPT_TOKENS[0] else ""
        rows.append((f"{length} tokens", f"{of['pair']:.1f} ms", f"{of['unified']:.1f} ms", f"{more:.1f} ms", goal))
    return markdown(("TTFT p50, one request at a time", *_SYSTEMS.values(), "difference", "goal"), rows)


def _first_token_ms(load: dict[str, Any]) -> float:
    """The median of those requests whose adapter an earlier request of the load had used."""
    used: set[str] = set()
    times = []
    for each in sorted(load["requests"], key=lambda each: float(each["sent_s"])):
        if each["adapter"] in used:
            times.append(1000 * (each["token_s"][0] - each["sent_s"]))
        used.add(each["adapter"])
    return median(times)


def _latencies(probe: dict[str, Any]) -> list[str]:
    found = probe["summary"]
    return [f"{found[key]['p50']:.0f}, {found[key]['p99']:.0f} ms" for key in ("ttft_ms", "tpot_ms")]
