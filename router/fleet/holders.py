"""Which workers have a revision in host memory, without asking each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.fleet.worker_residency import WorkerResidency


class Holders:
    """By revision id, the residencies that have it in host memory. They keep it current themselves."""

    def __init__(self) -> None:
        self._residencies: dict[str, tuple[WorkerResidency, ...]] = {}  # few each, of very many revisions

    def of(self, revision_id: str) -> tuple[WorkerResidency, ...]:
        return self._residencies.get(revision_id, ())

    def add(self, revision_id: str, residency: WorkerResidency) -> None:
        self._residencies[revision_id] = (*self.of(revision_id), residency)

    def discard(self, revision_id: str, residency: WorkerResidency) -> None:
        left = tuple(each for each in self.of(revision_id) if each is not residency)
        if left:
            self._residencies[revision_id] = left
        else:
            self._residencies.pop(revision_id, None)
