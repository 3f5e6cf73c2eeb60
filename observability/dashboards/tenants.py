"""Who is refused, and why."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import or_zero, rate_of

DASHBOARD = Dashboard(
    "prelude-tenants",
    "Tenants",
    "Refusals, and the record of who did what.",
    (
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
