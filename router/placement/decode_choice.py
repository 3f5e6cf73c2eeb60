"""Picks a pair's decode worker: of two random ones, the one with more free KV memory; the same domain is preferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from router.fleet.fleet_state import FleetState, WorkerView
from router.placement.request import PlacementRequest

_FEW = 4  # so many are all compared


def choose_decode(
    request: PlacementRequest,
    prefill: WorkerView,
    fleet: FleetState,
    may_serve: Callable[[WorkerView], bool] | None = None,
) -> WorkerView | None:
    """The decode worker for a prompt that `prefill` reads; None if no warm one satisfies `may_serve`."""
    decodes: Sequence[WorkerView] = fleet.warm_decodes(prefill)
    if may_serve is not None:
        decodes = [decode for decode in decodes if may_serve(decode)]
    if len(decodes) <= 1:
        return decodes[0] if decodes else None

    def cost(decode: WorkerView) -> tuple[bool, bool, float, int]:
        """Room for the sequence first, then the domain, then the share of KV memory that would be in use."""
        load = fleet.loads[decode.name]
        used = load.used_kv_tokens + request.size.kv_tokens
        has_room = not load.max_kv_tokens or used <= load.max_kv_tokens
        is_far = bool(prefill.domain and decode.domain and prefill.domain != decode.domain)
        share = used / load.max_kv_tokens if load.max_kv_tokens else 0.0
        return not has_room, is_far, share, load.num_sequences

    if len(decodes) > _FEW:
        near = decodes
        if prefill.domain:
            near = fleet.warm_decodes_in_domain(prefill)
            if may_serve is not None:
                near = [decode for decode in near if may_serve(decode)]
        costs = [(cost(decode), decode) for decode in _two_of(near or decodes, request.nonce)]
        (is_full, *_), best = min(costs, key=itemgetter(0))
        if not is_full:
            return best
    return min(decodes, key=cost)  # few, or two that are full


def _two_of(workers: Sequence[WorkerView], nonce: int) -> tuple[WorkerView, ...]:
    first, rest = nonce % len(workers), nonce // len(workers)
    if len(workers) == 1:
        return (workers[0],)
    return workers[first], workers[(first + 1 + rest % (len(workers) - 1)) % len(workers)]
