"""Adapter residency: which tiers hold adapters, loads and evictions."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import mean_of, or_zero, quantile_of, rate_of

_HITS, _LOADS = "prelude_worker_adapter_lease_hits_total", "prelude_worker_adapter_loads_total"
_STEP = "prelude_engine_adapter_step_seconds"

DASHBOARD = Dashboard(
    "prelude-adapters",
    "Adapters",
    "Where adapters are, how often they have to be loaded, and which ones are asked for.",
    (
        Panel(
            "Adapters by tier",
            "In the engines (ready to use), in host memory, and in disk caches, added up over workers: an adapter "
            "counts once per worker.",
            "short",
            (
                Query("sum(prelude_worker_resident_adapters)", "engine"),
                Query("sum by (tier) (prelude_worker_adapter_tier_adapters)", "{{tier}}"),
            ),
        ),
        Panel(
            "Tier use",
            "Bytes used or reserved over the tier's budget, by worker. A host tier at 1 evicts an adapter for each "
            "one it loads.",
            "percentunit",
            (
                Query(
                    "sum by (worker, tier) (prelude_worker_adapter_tier_bytes) / sum by (worker, tier) "
                    "(prelude_worker_adapter_tier_budget_bytes)",
                    "{{worker}} {{tier}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Hit rate",
            "Share of requests for an adapter that found it resident. It falls when more adapters are in use than "
            "fit, or when an adapter's requests are spread over too many workers.",
            "percentunit",
            (Query(f"{rate_of(_HITS)} / ({rate_of(_HITS)} + {rate_of(_LOADS)})", "hits"),),
            maximum=1,
        ),
        Panel(
            "Loads per second, by source",
            "store: the adapter store; disk: this worker's cache; host: in memory, but not in the engine; router: "
            "pushed. Loads from the store in normal use are cold loads that users wait for.",
            "ops",
            (Query(rate_of(_LOADS, "source"), "{{source}}"),),
            stacked=True,
        ),
        Panel(
            "Load time",
            "From the start of a load to residency, without time in the queue.",
            "s",
            tuple(
                Query(quantile_of(share, "prelude_worker_adapter_load_seconds"), f"p{share * 100:g}")
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            "Mean time per load stage",
            "room: wait for host memory; fetch: from the store; copy: from disk; check: signature and header; "
            "engine: the engine's load, between two batches; disk_write: off the critical path.",
            "s",
            (Query(mean_of("prelude_worker_adapter_load_stage_seconds", "stage"), "{{stage}}"),),
        ),
        Panel(
            "Loads running and queued",
            "And the requests that wait for them. A queue that stays is a cold-load storm.",
            "short",
            (
                Query("sum(prelude_worker_adapter_loads_running)", "running"),
                Query("sum(prelude_worker_adapter_loads_queued)", "queued"),
                Query("sum(prelude_worker_adapter_load_waiters)", "requests waiting"),
            ),
        ),
        Panel(
            "Slot swaps per second",
            "Adapters written into slots of engines (fill), slots cleared, adapters read in (load). Fills without "
            "loads: more adapters are in use at once than an engine has slots.",
            "ops",
            (Query(rate_of(f"{_STEP}_count", "step"), "{{step}}"),),
        ),
        Panel(
            "Time that swaps take from batches",
            "Share of each engine's time that its scheduler spends on adapters instead of the next batch.",
            "percentunit",
            (Query(rate_of(f"{_STEP}_sum", "instance"), "{{instance}}"),),
            limit=0.1,
        ),
        Panel(
            "Evictions per second",
            "Adapters that left a tier to make room. As many as loads: the working set does not fit.",
            "ops",
            (
                Query(rate_of("prelude_worker_adapter_evictions_total", "tier"), "{{tier}}"),
                Query(or_zero(rate_of("prelude_worker_adapter_evictions_total")), "all"),
            ),
        ),
        Panel(
            "Failed loads per second",
            "By error code. `damaged`: a cached file was broken, and fetched again.",
            "ops",
            (
                Query(rate_of(_LOADS, "result", 'result!="ok"'), "{{result}}"),
                Query(or_zero(rate_of(_LOADS, "", 'result!="ok"')), "all"),
            ),
        ),
        Panel(
            "Busiest adapters",
            "Requests per second over the last minute: at most twenty names per router process, and `(other)` for "
            "the rest.",
            "reqps",
            (Query("topk(20, sum by (adapter) (prelude_router_adapter_request_rate))", "{{adapter}}"),),
        ),
        Panel(
            "EnsureAdapter, by outcome",
            "What workers answered when the router asked for an adapter: resident, loaded, or an error's code.",
            "ops",
            (Query(rate_of("prelude_router_ensured_adapters_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Names resolved, by outcome",
            "memory: from the router's copy of the catalog. database: one query. not_found grows: a client asks for "
            "adapters that do not exist.",
            "ops",
            (Query(rate_of("prelude_router_resolutions_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
    ),
)
