"""PromQL as text: the names that a query uses, and the range of clusters that it looks at."""

from __future__ import annotations

import re

from observability.registry import series

# The name of a metric or of a recording rule, with its selector if it has one.
_SELECTOR = re.compile(r"(?<![\w:$])(up|prelude[_:][\w:]*|sglang:\w+|vllm:\w+)\b(?:\{([^}]*)\})?")
RECORDED = re.compile(r"prelude:[\w:]+")  # recording rules have colons where metrics have underscores


class UnknownMetric(ValueError):
    """A query names a metric that nothing exports."""


def names_in(query: str) -> set[str]:
    """The series and recording rules that a query names."""
    return {match[1] for match in _SELECTOR.finditer(query)}


def scoped(query: str, matcher: str) -> str:
    """The query with a further label matcher in each selector. Raises UnknownMetric."""

    def with_matcher(found: re.Match[str]) -> str:
        name, matchers = found[1], found[2]
        if name not in series() and not RECORDED.fullmatch(name):
            raise UnknownMetric(f"{name}: no process exports it; observability/registry.py has what there is")
        return f"{name}{{{matcher}{', ' + matchers if matchers else ''}}}"

    return _SELECTOR.sub(with_matcher, query)


def rate_of(name: str, by: str = "", matchers: str = "", *, window: str = "$__rate_interval") -> str:
    """The increase per second, added up by labels."""
    return f"sum{_by(by)} (rate({name}{_in_braces(matchers)}[{window}]))"


def mean_of(histogram: str, by: str = "", matchers: str = "", *, window: str = "$__rate_interval") -> str:
    """The mean of what a histogram observed."""
    rates = (rate_of(f"{histogram}_{part}", by, matchers, window=window) for part in ("sum", "count"))
    return " / ".join(rates)


def quantile_of(share: float, histogram: str, by: str = "", matchers: str = "") -> str:
    """A quantile of what a histogram observed."""
    rate = rate_of(f"{histogram}_bucket", ", ".join(filter(None, (by, "le"))), matchers)
    return f"histogram_quantile({share:g}, {rate})"


def or_zero(query: str) -> str:
    """The query, and 0 before its counter's first event. Of queries without labels only."""
    return f"({query}) or vector(0)"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _in_braces(matchers: str) -> str:
    return f"{{{matchers}}}" if matchers else ""
