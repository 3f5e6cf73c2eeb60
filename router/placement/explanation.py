"""Explains placements."""

from __future__ import annotations

from typing import Any

from router.fleet.fleet_state import FleetState
from router.placement.placement import Ranked, choose_decode, place, rank
from router.placement.policy import Policy
from router.placement.request import Placement, PlacementRequest


def explained(request: PlacementRequest, fleet: FleetState, policy: Policy) -> dict[str, Any]:
    """Every worker that could read the prompt, best first, with each scorer's cost in milliseconds."""
    placement = place(request, fleet, policy)
    return {
        "placement": placement and str(placement),
        "revision": request.revision_id,
        "prompt_tokens": request.size.prompt_tokens,
        "wanted_copies": policy.num_homes(request),
        "readers": [_reader(each, request, fleet, policy) for each in rank(request, fleet, policy)],
        "not_placeable": {
            name: worker.why_not_placeable for name, worker in sorted(fleet.workers.items()) if not worker.is_placeable
        },
    }


def summary(request: PlacementRequest, fleet: FleetState, policy: Policy, placement: Placement) -> str:
    """One line about a placement that was just made: its workers, and the costs of the worker that reads the prompt."""
    found = next((each for each in rank(request, fleet, policy) if each.worker.name == placement.prefill.name), None)
    if found is None:
        return str(placement)
    parts = ", ".join(f"{name} {cost_ms:g} ms" for name, cost_ms in _costs_ms(found, policy).items())
    return f"{placement} (home {found.candidate.rank + 1}; {parts})"


def _reader(ranked: Ranked, request: PlacementRequest, fleet: FleetState, policy: Policy) -> dict[str, Any]:
    worker, load = ranked.worker, ranked.candidate.load
    is_single = worker.role in request.single_roles
    decode = None if is_single else choose_decode(request, worker, fleet)
    return {
        "worker": worker.name,
        "role": worker.role,
        "decode": decode and decode.name,
        "cost_ms": round(1000 * ranked.cost_s, 3),
        "costs_ms": _costs_ms(ranked, policy),
        "home": ranked.candidate.rank + 1 if request.revision_id else None,
        "has_adapter": ranked.candidate.has_revision if request.revision_id else None,
        "queued_prompt_tokens": round(load.unread_tokens),
        "tokens_per_s": round(load.tokens_per_s, 1),
    }


def _costs_ms(ranked: Ranked, policy: Policy) -> dict[str, float]:
    names = [scorer.name for _, scorer in policy.scorers]
    return {name: round(1000 * part, 3) for name, part in zip(names, ranked.parts, strict=True)}
