"""Tables of a prefill/decode pair beside two unified workers on the same two GPUs, each a cluster with its router."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.evidence.cells import fixed, markdown, result

_SYSTEMS = {"pair": "a pair", "unified": "two unified workers"}
_SWEEPS = {name: result(f"sweep-h100x2-{name}.json") for name in _SYSTEMS}
_PROMPT_TOKENS = (512, 4096)
_FIRST_TOKENS = {
    (name, length): result(f"first-token-h100x2-{name}-{length}.json") for name in _SYSTEMS for length in _PROMPT_TOKENS
}


def goodput() -> str:
    """The highest rate at which 99 % of the requests meet both objectives, and the next one that was tried."""
    rows = []
    for name, text in _SYSTEMS.items():
        probes = sorted(_SWEEPS[name].document["probes"], key=lambda each: float(each["requests_per_s"]))
        best = _SWEEPS[name].document["best_requests_per_s"]
        held = next(each for each in probes if each["requests_per_s"] == best)
        missed = next(each for each in probes if each["requests_per_s"] > best)
        rows.append(
            (text, fixed(best, 1), *_latencies(held), f"{fixed(missed['requests_per_s'], 1)}: {_share(missed)}")
        )
    header = ("2048 + 128 tokens", "requests/s held", "TTFT p50, p99", "TPOT p50, p99", "within at the next rate")
    return markdown(header, rows)


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


def _share(probe: dict[str, Any]) -> str:
    return f"{probe['share']:.0%}"
