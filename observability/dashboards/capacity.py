"""What is full, and which pool to scale."""

from __future__ import annotations

from observability.panels import Dashboard, Panel, Query
from observability.queries import or_zero, rate_of

FULL_QUEUE_S, FULL_KV, FULL_DECODE = 2.0, 0.9, 0.9  # above which a pool is called short

DASHBOARD = Dashboard(
    "prelude-capacity",
    "Capacity",
    "How full workers are, and which pool to scale.",
    (
        Panel(
            "What to scale",
            f"Above 1, add workers of that pool: prefill, if prompts wait over {FULL_QUEUE_S:g} s to be read; "
            f"decode, if over {FULL_DECODE:.0%} of its room is used or waited for. Both far below 1 for long: remove "
            "some. Unified workers count as prefill.",
            "suffix: ×",
            (
                Query(f"sum(prelude_router_prefill_queue_seconds) / {FULL_QUEUE_S:g}", "prefill"),
                Query(f"max(prelude_router_decode_load_ratio) / {FULL_DECODE:g}", "decode"),
            ),
            limit=1,
        ),
        Panel(
            "Placeable workers, by role",
            "Workers that take requests now, in the routers' view.",
            "short",
            (Query("max by (role) (prelude_router_workers_placeable)", "{{role}}"),),
        ),
        Panel(
            "Prefill workers per decode worker",
            "The balance of the pools as it is. Move it towards the pool that `What to scale` shows.",
            "suffix: ×",
            (
                Query(
                    'max(prelude_router_workers_placeable{role="prefill"})'
                    ' / (max(prelude_router_workers_placeable{role="decode"}) > 0)',
                    "prefill : decode",
                ),
            ),
            kind="stat",
        ),
        Panel(
            "Prompt queue, by worker",
            "Expected time to read the prompts placed at a worker. One far above the others: its adapters are popular.",
            "s",
            (Query("sum by (worker) (prelude_router_worker_queue_seconds)", "{{worker}}"),),
            limit=FULL_QUEUE_S,
        ),
        Panel(
            "Waiting for decode",
            "Sequences that wait for room at decode workers, because others generate there. They are not in the queue "
            "of `What to scale`; the workers' prompt queues have them, too.",
            "short",
            (Query("max(prelude_router_decode_queue_requests)", "waiting"),),
        ),
        Panel(
            "KV memory in use, by worker",
            "Share in use or promised, of workers that generate.",
            "percentunit",
            (Query("max by (worker) (prelude_router_worker_kv_used_ratio)", "{{worker}}"),),
            maximum=1,
            limit=FULL_KV,
        ),
        Panel(
            "KV tokens, by role",
            "Tokens of running requests, and those that fit.",
            "short",
            (
                Query("sum by (role) (prelude_worker_used_kv_tokens)", "{{role}} used"),
                Query("sum by (role) (prelude_worker_max_kv_tokens)", "{{role}} room"),
            ),
        ),
        Panel(
            "Requests in engines, by role",
            "In the running batch, and waiting for their turn, their peer or their KV.",
            "short",
            (
                Query("sum by (role) (prelude_worker_running_requests)", "{{role}} running"),
                Query("sum by (role) (prelude_worker_queued_requests)", "{{role}} waiting"),
            ),
        ),
        Panel(
            "Engine calls in flight, by worker",
            "What the routers have placed. Uneven lines mean affinity, or a slow worker.",
            "short",
            (Query("sum by (worker) (prelude_router_worker_legs_in_flight)", "{{worker}}"),),
        ),
        Panel(
            "Where requests wait",
            "Queues of the engines: bootstrap (for the peer), inflight (KV is being sent), prealloc (decode has no "
            "KV memory), transfer (KV is being received), queue (for a batch).",
            "short",
            (
                Query("sum(sglang:num_queue_reqs)", "queue"),
                Query("sum(sglang:num_prefill_bootstrap_queue_reqs)", "prefill bootstrap"),
                Query("sum(sglang:num_prefill_inflight_queue_reqs)", "prefill inflight"),
                Query("sum(sglang:num_decode_prealloc_queue_reqs)", "decode prealloc"),
                Query("sum(sglang:num_decode_transfer_queue_reqs)", "decode transfer"),
            ),
            stacked=True,
        ),
        Panel(
            "Adapter slots per engine",
            "Slots, the base model's included, beside the adapters that each worker has resident. More resident "
            "adapters than slots are fine until many are used in one batch: see `Slot swaps` in Adapters.",
            "short",
            (
                Query("max(sglang:lora_pool_slots_total)", "slots"),
                Query("sum by (worker) (prelude_worker_resident_adapters)", "{{worker}} resident"),
            ),
        ),
        Panel(
            "Host memory left for adapters",
            "Budget less use, by worker. At zero, each load evicts an adapter first.",
            "bytes",
            (
                Query(
                    'sum by (worker) (prelude_worker_adapter_tier_budget_bytes{tier="host"})'
                    ' - sum by (worker) (prelude_worker_adapter_tier_bytes{tier="host"})',
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "Requests put back for lack of KV memory",
            "Retractions per second: decode took in more than it can finish. Any that stay: add decode workers.",
            "ops",
            (Query(or_zero(rate_of("sglang:num_retracted_requests_total")), "retracted"),),
        ),
    ),
)
