"""Placement with state: learns demand, load times and cached prefixes from requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import msgspec

from cluster.config.router import SloConfig
from router.fleet.fleet_state import FleetState
from router.fleet.worker_loads import InFlightLoad, WorkerLoads
from router.placement.placement import place
from router.placement.policy import Policy
from router.placement.request import Demand, FailedAttempts, Placement, PlacementRequest

_POOL_DECAY_S = 60.0  # autoscalers look every 15 to 30 s
_PREFILL = "prefill"
_WEIGHT_OF_NEWEST_LOAD = 0.1
_WEIGHT_OF_NEWEST_ANSWER = 0.05


class Placer:
    """One router's placement: the pure function `place`, and the observations that it reads."""

    def __init__(
        self,
        loads: WorkerLoads,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
        slo: SloConfig = SloConfig(),
    ) -> None:
        self.policy = Policy(slo)
        self._loads = loads
        self._demand = Demand()
        self._pool_demand = Demand(_POOL_DECAY_S)
        self._clock = clock
        self._random = random or Random()

    def observe(self, request: PlacementRequest) -> PlacementRequest:
        """Add the revision's current demand and a random number to the request. Call once per sequence."""
        demand, revision_id = 0.0, request.revision_id
        if revision_id is not None:
            demand = self._demand.seconds_per_s(revision_id, self._clock())
        return msgspec.structs.replace(request, demand=demand, nonce=self._random.getrandbits(32))

    def place(self, request: PlacementRequest, fleet: FleetState, failed: FailedAttempts) -> Placement | None:
        """As the function `place`."""
        return place(request, fleet, self.policy, failed)

    def take(self, request: PlacementRequest, placement: Placement) -> Reservation:
        """Count the sequence at the placement's workers."""
        size, reader, index = request.size, placement.prefill, self.policy.prefixes
        load, now = self._loads[reader.name], self._clock()
        read_s = size.prompt_tokens * load.s_per_token
        if request.revision_id is not None:
            # Each router sees a part of the demand, and takes it that the others see as much: so all want equal homes.
            self._demand.observe(request.revision_id, read_s * load.num_routers, now)
        if reader.role == _PREFILL:
            self._pool_demand.observe(_PREFILL, read_s, now)
        expected_tokens = 0.0
        if size.blocks:
            expected_tokens = index.cached_tokens(request, reader.name, reader.incarnation, is_sure=True)
            index.add(request, reader.name, reader.incarnation)
        in_flight = [
            self._loads.add(
                reader.name,
                prompt_tokens=size.prompt_tokens,
                kv_tokens=size.kv_tokens if placement.is_single else size.prompt_tokens,
                revision_id=request.revision_id,
                is_everywhere=request.positions == "all",
            )
        ]
        if not placement.is_single:
            in_flight.append(self._loads.add(placement.decode.name, kv_tokens=size.kv_tokens))
        was_on_disk = request.stored_id in placement.prefill.residency.disk
        return Reservation(request, placement, in_flight, expected_tokens, was_on_disk)

    @property
    def prefill_demand(self) -> float:
        """Prefill workers that this router's recent prompts keep busy."""
        return self._pool_demand.seconds_per_s(_PREFILL, self._clock())

    def loaded(self, reservation: Reservation, seconds: float) -> None:
        """Learn how long the reader took to load the revision, as its agent measured it; 0: it was resident."""
        if seconds:
            load_s, tier = self.policy.load_s, "disk" if reservation.was_on_disk else "store"
            load_s[tier] += _WEIGHT_OF_NEWEST_LOAD * (seconds - load_s[tier])

    def answered(self, tokens: int) -> None:
        """Learn how long answers are."""
        self.policy.answer_tokens += _WEIGHT_OF_NEWEST_ANSWER * (max(1, tokens) - self.policy.answer_tokens)

    def found_cached(self, reservation: Reservation, tokens: int) -> None:
        """The reader's engine has read the prompt, and found so many tokens of it in its prefix cache."""
        reader, prefixes = reservation.placement.prefill, self.policy.prefixes
        prefixes.was_read(reservation.request, reader.name, reader.incarnation)
        prefixes.observe(reader.name, expected_tokens=reservation.expected_cached_tokens, cached_tokens=tokens)


class Reservation(msgspec.Struct, frozen=True):
    """A sequence that is counted at its workers."""

    request: PlacementRequest
    placement: Placement
    in_flight: list[InFlightLoad]  # one for each worker, that of the prompt's reader first
    expected_cached_tokens: float  # of the prompt, in the reader's prefix cache
    was_on_disk: bool  # the revision, of the reader's; a load from a store puts it there

    def release(self) -> None:
        for load in self.in_flight:
            load.release()
