"""How much is served, and how much of it fast enough."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import mean_of, or_zero, rate_of

_PHASE = "prelude_router_phase_seconds"
_SLO = "prelude_router_slo_requests_total"
_GOODPUT = rate_of(_SLO, "", 'met="true"')
_TOKENS = "sglang:realtime_tokens_total"
_CACHED = rate_of(_TOKENS, "", 'mode="prefill_cache"')
_PROMPT = rate_of(_TOKENS, "", 'mode=~"prefill_.*"')


def _tax(phase: str) -> str:
    adapted, base = (mean_of(_PHASE, "", f'phase="{phase}", adapted="{adapted}"') for adapted in ("true", "false"))
    return f"({adapted}) / ({base})"


DASHBOARD = Dashboard(
    "prelude-throughput",
    "Throughput",
    "Tokens, requests and goodput, and what adapters cost.",
    (
        Panel(
            "Tokens per second",
            "What engines work through, by role: prompt tokens computed, prompt tokens found in the prefix cache, "
            "tokens generated. SGLang adds them up at intervals, so short peaks look flat.",
            "suffix: tok/s",
            (Query(rate_of(_TOKENS, "engine_type, mode"), "{{engine_type}} {{mode}}"),),
            stacked=True,
        ),
        Panel(
            "Requests per second, by status",
            "Answers of the router. 499: the client left. Growing 5xx: see the dashboard Health.",
            "reqps",
            (Query(rate_of("prelude_router_requests_total", "status"), "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Goodput",
            "Requests answered in full, and those of them that kept the times of router.slo. A gap between the lines "
            "is work done too late.",
            "reqps",
            (Query(rate_of(_SLO), "answered"), Query(or_zero(_GOODPUT), "goodput")),
        ),
        Panel(
            "Answers that kept router.slo",
            "Share of the requests answered in full.",
            "percentunit",
            (Query(f"({or_zero(_GOODPUT)}) / {rate_of(_SLO)}", "kept"),),
            kind="stat",
            maximum=1,
        ),
        Panel(
            "Requests in flight",
            "Requests that routers are serving. It grows without bound only if workers cannot keep up: see Capacity.",
            "short",
            (Query("sum(prelude_router_requests_in_flight)", "in flight"),),
        ),
        Panel(
            "Adapter tax",
            "Mean time with an adapter over mean time without: until the first event, and while the answer is "
            "relayed. Both should stay near 1; the second is 1 by design, as decode runs base weights. Prompts "
            "differ, so only a change over time means something.",
            "suffix: ×",
            (
                Query(_tax("waiting_first_event"), "to the first event"),
                Query(_tax("relaying"), "relaying"),
            ),
        ),
        Panel(
            "Requests per second, by endpoint",
            "Which part of the API clients use, refused requests included.",
            "reqps",
            (Query(rate_of("prelude_router_requests_total", "endpoint"), "{{endpoint}}"),),
            stacked=True,
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "Share of prompt tokens that prefill did not compute. A fall means that requests with a common beginning "
            "reach other workers, or that KV memory is short.",
            "percentunit",
            (Query(f"({or_zero(_CACHED)}) / {_PROMPT}", "cached"),),
            maximum=1,
        ),
        Panel(
            "Connections",
            "Open connections of clients at the routers, and of the routers at engines.",
            "short",
            (
                Query("sum(prelude_router_connections)", "clients"),
                Query("sum(prelude_router_engine_connections)", "engines"),
            ),
        ),
    ),
)
