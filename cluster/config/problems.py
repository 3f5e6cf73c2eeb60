"""What is wrong with a field of `cluster.yaml`, in words. Of a field that 0.1.0 had, the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

_CONSTANT = "is a constant since 0.2.0; remove it"
_IN_HANG_TIMEOUT = "follows from hang_timeout_s since 0.2.0; remove it"
_REMOVED = {
    "more_arguments": "is gone since 0.2.0; use extra_arguments, which are now added to those of the cluster",
    "compute_timeout_s": _IN_HANG_TIMEOUT,
    "batch_timeout_s": _IN_HANG_TIMEOUT,
    "ebnf_bytes": "is gone since 0.2.0: EBNF grammars are not served; remove it",
    "processes": "is gone since 0.2.0: a router is one process; run several behind a load balancer",
    "protocol": "is gone since 0.2.0: traces go by OTLP over HTTP; remove it",
    "engine_level": "is gone since 0.2.0; set SGLANG_TRACE_LEVEL",
    **dict.fromkeys(
        ("kubernetes", "kubeconfig"),
        "is gone since 0.2.0; set `dns` to the name of a headless Service with publishNotReadyAddresses",
    ),
    "each_adapter": "is gone since 0.2.0; limit tenants and keys",
    "quotas.adapters": "is gone since 0.2.0; limit tenants and keys",
    "grammars_per_min": "is gone since 0.2.0; use requests_per_s",
    "in_flight_bytes": "is gone since 0.2.0: a tenant has at most half of router.limits.in_flight_bytes; remove it",
    "adapter_root": "is gone since 0.2.0; send adapters' files to POST /v1/adapters",
    "audit": "is gone since 0.2.0: the log is in the catalog; remove it, and read it with `prelude audit`",
    **dict.fromkeys(
        ("nodes", "rendezvous_port", "nodes_dns"),
        "is gone since 0.2.0: an engine runs on one node; start more decode workers",
    ),
    "worker_sequences": "is gone since 0.2.0: it is always the engine's max_running_requests; remove it",
    **dict.fromkeys(
        (
            # router
            "max_choices", "connect_timeout_s", "progress_timeout_s", "body_timeout_s", "heartbeat_s", "max_attempts",
            "upload_timeout_s", "refresh_s", "queue_s", "placement",
            # router.http
            "max_header_bytes", "max_headers", "max_target_bytes", "max_pipelined", "header_timeout_s",
            "body_gap_timeout_s",
            # router.limits
            "prompt_bytes_per_token", "choice_bytes", "nesting", "content_parts", "tool_calls", "stops", "stop_bytes",
            "stop_token_ids", "logit_bias", "choice_biases", "prompt_logprobs", "answer_logprobs", "regex_bytes",
            # discovery, engine, residency
            "max_workers", "forget_after_s", "max_events_per_s", "queued_loads", "lease_s",
        ),
        _CONSTANT,
    ),
}  # fmt: skip


def in_words(problem: Mapping[str, Any]) -> str:
    """One of pydantic's problems: what is wrong with a field, and its value."""
    location, value = problem["loc"], problem.get("input")
    if problem["type"] == "extra_forbidden":
        section, field = ("", *map(str, location))[-2:]
        if remedy := _REMOVED.get(field) or _REMOVED.get(f"{section}.{field}"):
            return f"it {remedy}"
    shown = "" if isinstance(value, (dict, list)) or problem["type"] == "missing" else f" (found {value!r})"
    return f"{problem['msg'].removeprefix('Value error, ')}{shown}"


def all_in_words(error: ValidationError) -> str:
    """All problems, each with its field."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, problem["loc"])), in_words(problem)))) for problem in error.errors()
    )
