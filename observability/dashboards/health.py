"""What is broken, or about to be."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import or_zero, rate_of

_REQUESTS, _ERRORS = "prelude_router_requests_total", "prelude_router_stream_errors_total"
_5XX = rate_of(_REQUESTS, "", 'status=~"5.."')

DASHBOARD = Dashboard(
    "prelude-health",
    "Health",
    "What is broken, or about to be. Alerts with their pages are in docs/operations.",
    (
        Panel(
            "Workers by state",
            "In the routers' view. blocked: calls to it have failed. lost: its agent does not answer. hung: its "
            "engine shows no sign of life and is started again.",
            "short",
            (Query("max by (role, state) (prelude_router_workers) > 0", "{{role}} {{state}}"),),
            stacked=True,
        ),
        Panel(
            "Ready workers",
            "1 while a worker takes requests, in its agent's own view.",
            "none",
            (Query("max by (worker) (prelude_worker_ready)", "{{worker}}"),),
            maximum=1,
        ),
        Panel(
            "Hung engines",
            "Engines without a sign of life, now. Anything above 0 has an alert.",
            "none",
            (Query("sum(prelude_worker_hung)", "hung"),),
            kind="stat",
            limit=1,
        ),
        Panel(
            "Failed requests",
            "Share of answers that are 5xx, and streams that ended with an error event over all answers.",
            "percentunit",
            (
                Query(f"({or_zero(_5XX)}) / {rate_of(_REQUESTS)}", "5xx"),
                Query(f"({or_zero(rate_of(_ERRORS))}) / {rate_of(_REQUESTS)}", "broken streams"),
            ),
        ),
        Panel(
            "Error budget burn",
            "How many times faster than allowed the error budget is used, over an hour and over six. 1 uses it up in "
            "exactly 30 days; 14.4 pages.",
            "suffix: ×",
            (
                Query("prelude:unavailable:burn_rate1h", "errors, 1 h"),
                Query("prelude:unavailable:burn_rate6h", "errors, 6 h"),
                Query("prelude:slow:burn_rate1h", "slow, 1 h"),
                Query("prelude:slow:burn_rate6h", "slow, 6 h"),
            ),
            limit=14.4,
        ),
        Panel(
            "Broken streams, by code",
            "Streams that ended with an error event.",
            "ops",
            (Query(rate_of(_ERRORS, "code"), "{{code}}"), Query(or_zero(rate_of(_ERRORS)), "all")),
        ),
        Panel(
            "Retries and aborts",
            "Attempts repeated elsewhere, by the failure before; and engine calls that were given up, mostly because "
            "their client left.",
            "ops",
            (
                Query(rate_of("prelude_router_retries_total", "reason"), "retry after {{reason}}"),
                Query(or_zero(rate_of("prelude_router_retries_total")), "all retries"),
                Query(or_zero(rate_of("prelude_router_aborts_total")), "all aborts"),
            ),
        ),
        Panel(
            "Engine restarts",
            "Since the agent started, by worker. Steps in a row: the engine does not survive its start or its load.",
            "none",
            (Query("max by (worker) (prelude_worker_engine_restarts)", "{{worker}}"),),
        ),
        Panel(
            "KV transfers failed",
            "Since the engine started: transfers that failed, and those that could not begin.",
            "none",
            (
                Query(or_zero("sum(sglang:num_transfer_failed_reqs_total)"), "failed"),
                Query(or_zero("sum(sglang:num_bootstrap_failed_reqs_total)"), "not begun"),
            ),
            limit=1,
        ),
        Panel(
            "Warm pairs",
            "Decode engines that each prefill engine has proved that KV reaches. Fewer than there are decode "
            "workers: see why on the router's /ready.",
            "none",
            (Query('max by (worker) (prelude_worker_warm_pairs{role="prefill"})', "{{worker}}"),),
        ),
        Panel(
            "Catalog staleness",
            "Age of the names that routers serve. Under a second while the catalog answers.",
            "s",
            (Query("max(prelude_router_catalog_staleness_seconds)", "age"),),
            limit=30,
        ),
        Panel(
            "Certificates expire in",
            "By certificate, the earliest. Without TLS there is nothing to show.",
            "s",
            (Query("min by (certificate) (prelude_certificate_expiry_timestamp_seconds) - time()", "{{certificate}}"),),
        ),
        Panel(
            "Scrape targets that answer",
            "Of the jobs whose names begin with prelude. A line below its usual height: a process is gone, or "
            "Prometheus cannot reach it.",
            "short",
            (Query('sum by (job) (up{job=~".*prelude.*"})', "{{job}}"),),
        ),
        Panel(
            "Router processes",
            "Processes whose metrics are added up.",
            "short",
            (Query("sum(prelude_router_processes)", "processes"),),
        ),
    ),
)
