"""What is wrong with a field of `cluster.yaml`, in words. Of a field that 0.1.0 had, the remedy."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

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


def in_words(problem: Mapping[str, Any], root: type[BaseModel]) -> str:
    """One of pydantic's problems with a `root`: what is wrong with a field, and its value."""
    location, value = problem["loc"], problem.get("input")
    if problem["type"] == "extra_forbidden":
        section, field = ("", *map(str, location))[-2:]
        if remedy := _REMOVED.get(field) or _REMOVED.get(f"{section}.{field}"):
            return f"it {remedy}"
        known = _fields_of(root, location[:-1])
        near = difflib.get_close_matches(field.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
        return f"there is no such field; {hint}"
    if value is None and problem["type"] in ("model_type", "dict_type"):
        return "it is empty; remove it, or give it fields"
    shown = "" if isinstance(value, (dict, list)) or problem["type"] == "missing" else f" (found {value!r})"
    words = f"{problem['msg'].removeprefix('Value error, ')}{shown}"
    # YAML reads `no`, `on` and `12` so.
    return f"{words}; write it in quotes" if problem["type"] == "string_type" and isinstance(value, int) else words


def all_in_words(error: ValidationError, root: type[BaseModel]) -> str:
    """All problems, each with its field."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, problem["loc"])), in_words(problem, root))))
        for problem in error.errors()
    )


def _fields_of(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The fields of the section at a location. Parts that are no fields are keys or numbers of entries."""
    sections = [root]
    for part in location:
        fields = [each.model_fields[str(part)] for each in sections if part in each.model_fields]
        sections = [section for each in fields for section in _sections_in(each.annotation)] or sections
    return sorted({name for each in sections for name in each.model_fields})


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Those that a field may hold: `A | None`, `dict[str, A]`, …"""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for each in get_args(annotation) for section in _sections_in(each)]
