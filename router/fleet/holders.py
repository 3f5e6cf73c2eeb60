"""Which workers have a revision in host memory, without asking each of them."""

from __future__ import annotations


class Holders:
    """Maps a revision id to the WorkerResidency objects that have it in host memory, which keep this index current."""

    def __init__(self) -> None:
        self._holders: dict[str, tuple[object, ...]] = {}  # few each, of very many revisions

    def of(self, revision_id: str) -> tuple[object, ...]:
        return self._holders.get(revision_id, ())

    def add(self, revision_id: str, holder: object) -> None:
        self._holders[revision_id] = (*self.of(revision_id), holder)

    def discard(self, revision_id: str, holder: object) -> None:
        left = tuple(each for each in self.of(revision_id) if each is not holder)
        if left:
            self._holders[revision_id] = left
        else:
            self._holders.pop(revision_id, None)
