"""Where the time of a request goes."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import mean_of, quantile_of

_QUANTILES = (0.5, 0.95, 0.99)


def _quantiles(histogram: str, matchers: str = "") -> tuple[Query, ...]:
    return tuple(Query(quantile_of(share, histogram, "", matchers), f"p{share * 100:g}") for share in _QUANTILES)


DASHBOARD = Dashboard(
    "prelude-latency",
    "Latency",
    "Where the time of a request goes, from the client's view down to the engines.",
    (
        Panel(
            "Time to first token",
            "Of streams: from a request's head to its first event. If it grows, the phases below say where.",
            "s",
            _quantiles("prelude_router_time_to_first_token_seconds"),
        ),
        Panel(
            "Time between events",
            "Mean gap of each stream, as clients see it. It grows with the number of sequences that a decode worker "
            "runs.",
            "s",
            _quantiles("prelude_router_event_gap_seconds"),
        ),
        Panel(
            "Whole request",
            "From a request's head to the end of its answer.",
            "s",
            _quantiles("prelude_router_request_duration_seconds"),
        ),
        Panel(
            "Mean time per phase",
            "Of sequences, in the router's view. admitted: waits for a worker. ensuring_adapter: a load, if it is "
            "cold. waiting_first_event: queue, prompt and KV transfer. Failed attempts count.",
            "s",
            (Query(mean_of("prelude_router_phase_seconds", "phase", 'phase!="relaying"'), "{{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Adapter resident",
            "Wait until an adapter was resident at the worker that reads the prompt. Milliseconds if it already was; "
            "more is a cold load: see Adapters.",
            "s",
            _quantiles("prelude_router_ensure_adapter_seconds"),
        ),
        Panel(
            "Queue in engines, p95",
            "Wait in an engine's scheduler, by role. A queue at prefill: too few workers read prompts.",
            "s",
            (Query(quantile_of(0.95, "sglang:queue_time_seconds", "engine_type"), "{{engine_type}}"),),
        ),
        Panel(
            "KV transfer",
            "Time to send a request's KV cache from prefill to decode. It grows with prompts, and with what else "
            "uses the network.",
            "ms",
            _quantiles("sglang:kv_transfer_latency_ms", 'engine_type="prefill"'),
        ),
        Panel(
            "KV sent",
            "KV cache that prefill engines send, added up.",
            "MBs",
            (Query('sum(rate(sglang:kv_transfer_total_mb_sum{engine_type="prefill"}[$__rate_interval]))', "sent"),),
        ),
        Panel(
            "Mean time per engine stage",
            "What engines report of each request: bootstrap (pair up), forward, transfer, prepare, waiting. The "
            "stage that grows is where to look.",
            "s",
            (Query(mean_of("sglang:per_stage_req_latency_seconds", "stage"), "{{stage}}"),),
        ),
        Panel(
            "Time between tokens at decode",
            "As engines measure it, without network and router.",
            "s",
            _quantiles("sglang:inter_token_latency_seconds", 'engine_type!="prefill"'),
        ),
    ),
)
