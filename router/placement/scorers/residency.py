"""The time to make a revision resident."""

from __future__ import annotations

from router.placement.request import LoadTimes
from router.placement.scorers.scorer import Candidate, Choice


class ResidencyScorer:
    """0 if the revision is resident or being loaded, else the time of a load from the nearest tier that has it."""

    name = "residency"

    def __init__(self, load_times: LoadTimes) -> None:
        self._load_times = load_times

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        revision_id = choice.request.revision_id
        if revision_id is None or candidate.has_revision:
            return 0.0
        return self._load_times["disk" if revision_id in candidate.worker.residency.disk else "store"]

    def least_s(self, choice: Choice) -> float:
        if choice.request.revision_id is None:
            return 0.0
        store_s, disk_s = self._load_times["store"], self._load_times["disk"]
        # A copy more than demand asks for is not looked for on disks.
        return min(store_s, disk_s) if choice.has_enough_copies else store_s
