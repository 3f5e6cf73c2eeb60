"""Which role is short of workers, by how prefill and decode workers have spent their time lately. A pure function."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config.router import SloConfig
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.queues import decode_share
from router.fleet.saturation import NONE_WAITS, Waiting, mean, turns_wait_for

OTHER = {"prefill": "decode", "decode": "prefill"}
SHORT = 0.8  # load of a role from which on it is short of workers
_ROOM = 0.8  # of that, the most that workers of the other role may have once they are one fewer
_FULL = 1 / _ROOM  # from which on they may be full then: prompts or answers already wait
_KEPT = 0.8  # of the weight of earlier looks, at each look


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The workers of a role that take requests."""

    num_workers: int
    share: float  # of what they can do within the objectives, in the mean; above 1 with what waits


class RecentSpending:
    """What engines have spent the time of the last few looks with."""

    def __init__(self) -> None:
        # By worker and incarnation: time and counts at the last look, and weighted sums of their differences.
        self._seen: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    def look(self, now: float, fleet: FleetState) -> None:
        seen, self._seen = self._seen, {}
        for view in fleet.workers.values():
            counts = (now, *fleet.loads[view.name].spent)
            before, sums = seen.get((view.name, view.incarnation), (counts, (0.0,) * len(counts)))
            differences = (max(0.0, count - old) for count, old in zip(counts, before, strict=True))
            sums = tuple(_KEPT * kept + new for kept, new in zip(sums, differences, strict=True))
            self._seen[view.name, view.incarnation] = counts, sums

    def of(self, view: WorkerView) -> tuple[float, float]:
        """Share of the time in which the worker read prompts, and mean seconds of a decode step; 0 without any."""
        _, (seconds, reading_us, steps, step_us) = self._seen[view.name, view.incarnation]
        return min(1.0, reading_us / 1e6 / (seconds or math.inf)), step_us / 1e6 / (steps or math.inf)


def role_loads(
    fleet: FleetState, spending: RecentSpending, slo: SloConfig, waiting: Waiting = NONE_WAITS
) -> dict[str, RoleLoad]:
    """The load of each role.

    Prefill: the share of time in which prompts are read, and the wait of queued ones, by the time to a first token.
    Decode: the share of memory or sequences, whichever is fuller, or the pace. Half the objective counts as idle, since
    steps have costs that more workers do not lower; at the objective a worker is full.
    """
    prefills = [view for view in fleet.readers if view.role == "prefill"]
    waits_for_decode = decode_share(fleet.loads[view.name].queues for view in fleet.decodes)

    def prefill(view: WorkerView) -> float:
        load = fleet.loads[view.name]
        queue_s = load.wait_s * (1 - waits_for_decode * load.queues.blocked_share)
        reading_share, _ = spending.of(view)
        return reading_share + queue_s / slo.first_token_s

    def decode(view: WorkerView) -> float:
        load = fleet.loads[view.name]
        _, step_s = spending.of(view)
        pace = 2 * step_s / slo.event_gap_s - 1
        return max(load.queues.load_ratio(load.max_kv_tokens), min(1.0, pace))

    unread_s, _, waiting_share = turns_wait_for(fleet, waiting)
    return {
        "prefill": RoleLoad(len(prefills), mean([prefill(view) for view in prefills]) + unread_s / slo.first_token_s),
        "decode": RoleLoad(len(fleet.decodes), mean([decode(view) for view in fleet.decodes]) + waiting_share),
    }


def wanted_workers(load: RoleLoad) -> int:
    """How many workers would have this load without being short: at least one, at most twice as many as there are."""
    enough = math.ceil(round(load.num_workers * load.share / SHORT, 6))
    return max(1, min(enough, 2 * load.num_workers))


def short_role(loads: Mapping[str, RoleLoad]) -> str | None:
    """The role that a worker of the other one should get, if the others can do without it.

    Never the other one at once after the change: that one is less short then, whatever the numbers.
    """
    for role, other in OTHER.items():
        short, giver = loads[role], loads[other]
        if short.share < SHORT or giver.num_workers < 2:
            continue
        if giver.share * giver.num_workers / (giver.num_workers - 1) <= _ROOM * min(_FULL, short.share):
            return role
    return None
