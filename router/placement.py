"""Which pair of workers a request goes to: a pure function, so that it can be simulated and tested without a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from router.fleet_state import FleetState, WorkerView


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement may know of a request."""

    revision_id: str | None  # None: the base model


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker and the decode worker that it ships KV to."""

    prefill: WorkerView
    decode: WorkerView

    def __str__(self) -> str:
        return f"{self.prefill.name}>{self.decode.name}"


def rank_pairs(request: PlacementRequest, fleet: FleetState) -> list[Pair]:
    """The pairs that can take the request now, best first: fewest of this router's requests in flight, then by name."""
    pairs = [
        Pair(prefill, decode)
        for prefill in fleet.workers.values()
        if prefill.role == "prefill" and prefill.is_placeable
        for decode in fleet.workers.values()
        if decode.role == "decode" and decode.is_placeable and prefill.is_warm_with(decode)
    ]

    def load(pair: Pair) -> tuple[int, str, str]:
        in_flight = fleet.in_flight.get(pair.prefill.name, 0) + fleet.in_flight.get(pair.decode.name, 0)
        return in_flight, pair.prefill.name, pair.decode.name

    return sorted(pairs, key=load)
