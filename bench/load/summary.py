"""The summary of a load. Latencies count from the intended send times; failures are counted, but not in latencies."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.errors import BenchError
from bench.load.record import ERROR_KINDS, Record

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SLO_KEYS = ("ttft", "tpot", "e2e")  # ms, as `--goodput` of vLLM's benchmark has them
_MAX_DETAILS = 20


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed: always one of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def figures(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and maximum of seconds, in ms; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {"mean": statistics.fmean(ordered), **{name: quantile(ordered, share) for name, share in QUANTILES.items()}}
    return {name: round(1000 * value, 4) for name, value in {**found, "max": ordered[-1]}.items()}


def latencies(records: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    """Of the records without an error."""
    good = [each for each in records if each.error is None]
    return {
        "ttft_ms": figures(each.ttft_s for each in good),
        "itl_ms": figures(gap for each in good for gap in each.itl_s),
        "tpot_ms": figures(each.tpot_s for each in good if each.tpot_s is not None),
        "e2e_ms": figures(each.e2e_s for each in good),
        "send_lag_ms": figures(each.sent_s - each.intended_s for each in good),
    }


def meets(record: Record, slo_ms: dict[str, float]) -> bool:
    """Whether a request was answered within every objective. A failed one was not. One token has no TPOT to miss."""
    if record.error is not None:
        return False
    measured = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(1000 * measured[key] <= limit for key, limit in slo_ms.items())


def duration_s(records: Sequence[Record]) -> float:
    """From the first intended time to the last end."""
    if not records:
        return 0.0
    return max(each.end_s for each in records) - min(each.intended_s for each in records)


def summary(records: Sequence[Record], slo_ms: dict[str, float]) -> dict[str, Any]:
    """All figures of a load. Raises BenchError without a record."""
    if not records:
        raise BenchError("no request was due: the load was too short")
    good = [each for each in records if each.error is None]
    seconds = duration_s(records)
    prompt, output = sum(each.prompt_tokens or 0 for each in good), sum(each.output_tokens for each in good)
    num_meeting = sum(meets(each, slo_ms) for each in records)
    return {
        "duration_s": round(seconds, 4),
        "num_requests": len(records),
        "num_good": len(good),
        "num_failed": len(records) - len(good),
        "failed_share": round(1 - len(good) / len(records), 6),
        "requests_per_s": round(len(good) / seconds, 4),
        "output_tokens_per_s": round(output / seconds, 2),
        "total_tokens_per_s": round((prompt + output) / seconds, 2),
        "prompt_tokens": prompt,
        "cached_prompt_tokens": sum(each.cached_tokens or 0 for each in good),
        "output_tokens": output,
        "num_short": sum(each.output_tokens < each.max_tokens for each in good),
        "slo_ms": slo_ms,
        "goodput": {"share": round(num_meeting / len(records), 6), "requests_per_s": round(num_meeting / seconds, 4)}
        if slo_ms
        else None,
        **latencies(records),
        "errors": errors(records),
    }


def errors(records: Iterable[Record]) -> dict[str, Any]:
    """Counts by kind, and by what was said, most frequent first."""
    failed = [each for each in records if each.error is not None]
    kinds = Counter(each.error for each in failed)
    details = Counter((each.error, each.status, each.detail) for each in failed)
    return {
        "by_kind": {kind: kinds[kind] for kind in ERROR_KINDS if kinds[kind]},
        "most_frequent": [
            {"kind": kind, "status": status, "detail": detail, "count": count}
            for (kind, status, detail), count in details.most_common(_MAX_DETAILS)
        ],
    }
