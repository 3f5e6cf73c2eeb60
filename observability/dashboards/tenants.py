"""Who uses how much, who is refused, and why."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import or_zero, quantile_of, rate_of

DASHBOARD = Dashboard(
    "prelude-tenants",
    "Tenants",
    "Use against quotas, refusals, and the record of who did what.",
    (
        Panel(
            "Quota used, by tenant and limit",
            "Share of each limit that is used at the router where it is highest; 1 refuses. Tenants that cluster.yaml "
            "does not name are together in `other`: the most of any of them. Empty without router.quotas.",
            "percentunit",
            (Query("max by (tenant, limit) (prelude_router_quota_used_ratio)", "{{tenant}} {{limit}}"),),
            maximum=1,
            limit=0.9,
        ),
        Panel(
            "Tokens per second, by tenant",
            "Of requests that have ended, where there are quotas.",
            "suffix: tok/s",
            (
                Query(rate_of("prelude_router_tenant_tokens_total", "tenant, kind"), "{{tenant}} {{kind}}"),
                Query(or_zero(rate_of("prelude_router_tenant_tokens_total")), "all"),
            ),
        ),
        Panel(
            "Refused for a quota",
            "429 answers, by tenant and limit. One tenant, steadily: its quota is too small, or its client does not "
            "heed retry-after.",
            "reqps",
            (
                Query(rate_of("prelude_router_quota_refusals_total", "tenant, limit"), "{{tenant}} {{limit}}"),
                Query(or_zero(rate_of("prelude_router_quota_refusals_total")), "all"),
            ),
        ),
        Panel(
            "Waiting for their turn",
            "Requests that wait in routers while the fleet is saturated, and tenants share it by their weights.",
            "short",
            (Query("sum(prelude_router_queued_requests)", "waiting"),),
        ),
        Panel(
            "Wait for a turn, p95",
            "Of the requests that had to wait. One tenant above the others: it asks for more than its share.",
            "s",
            (
                Query(quantile_of(0.95, "prelude_router_queue_seconds", "tenant"), "{{tenant}}"),
                Query(or_zero(quantile_of(0.95, "prelude_router_queue_seconds")), "all"),
            ),
        ),
        Panel(
            "Refused because of who asked",
            "By code: no key, a revoked one, a scope that is missing. A burst from one moment on is a client with a "
            "stale key; `prelude audit` names it.",
            "reqps",
            (
                Query(rate_of("prelude_router_denials_total", "code"), "{{code}}"),
                Query(or_zero(rate_of("prelude_router_denials_total")), "all"),
            ),
        ),
        Panel(
            "Refused requests, by status",
            "Answers 400 to 498: 401 and 403 are about the caller, 404 about names, 413 and 429 about limits.",
            "reqps",
            (
                Query(rate_of("prelude_router_requests_total", "status", 'status=~"4.."'), "{{status}}"),
                Query(or_zero(rate_of("prelude_router_requests_total", "", 'status=~"4..", status!="499"')), "all"),
            ),
        ),
        Panel(
            "Connections closed for what their client did",
            "By code: too slow, too many, too large.",
            "ops",
            (
                Query(rate_of("prelude_router_connections_refused_total", "code"), "{{code}}"),
                Query(or_zero(rate_of("prelude_router_connections_refused_total")), "all"),
            ),
        ),
        Panel(
            "Changes of adapters",
            "Requests over HTTP that import, push, move aliases, roll back and so on.",
            "ops",
            (
                Query(rate_of("prelude_router_adapter_changes_total", "kind, result"), "{{kind}} {{result}}"),
                Query(or_zero(rate_of("prelude_router_adapter_changes_total")), "all"),
            ),
        ),
        Panel(
            "Audit events lost",
            "Events that could not be written while the audit log was unavailable. Anything above 0 is a hole in it.",
            "none",
            (Query("sum(prelude_router_audit_events_lost_total)", "lost"),),
            kind="stat",
            limit=1,
        ),
        Panel(
            "Bodies of requests in flight",
            "Bytes, added up over routers; router.limits.in_flight_bytes bounds each of them.",
            "bytes",
            (Query("sum(prelude_router_body_bytes)", "bodies"),),
        ),
    ),
)
