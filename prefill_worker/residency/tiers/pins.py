"""Pins: which revisions must stay in host memory, and who owns each pin.

A revision id is of the content, which several tenants may have, so each tenant owns a pin of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prefill_worker.residency.errors import PinsExceedBudget


class PinOwner(enum.Enum):
    """Owners besides tenants, which are strings, and calls in progress."""

    PUSH = "push"  # a router pushed the revision, and no store has it


@dataclass(slots=True)
class _Pin:
    num_bytes: int
    owners: set[Hashable] = field(default_factory=set)


class Pins(Mapping[str, frozenset[Hashable]]):
    """Revision -> its owners. A revision is pinned, resident or not, until its last owner releases it."""

    def __init__(self, budget_bytes: int, on_unpinned: Callable[[], None]) -> None:
        self._budget_bytes = budget_bytes
        self._on_unpinned = on_unpinned
        self._pins: dict[str, _Pin] = {}

    def __getitem__(self, revision_id: str) -> frozenset[Hashable]:
        return frozenset(self._pins[revision_id].owners)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pins)

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_bytes(self) -> int:
        """Host memory that the pinned revisions take, resident or not."""
        return sum(pin.num_bytes for pin in self._pins.values())

    def is_owned(self, revision_id: str, owner: Hashable) -> bool:
        return revision_id in self._pins and owner in self._pins[revision_id].owners

    def tenants_of(self, revision_id: str) -> list[str]:
        """The tenants that have pinned a revision, in alphabetical order."""
        pin = self._pins.get(revision_id)
        return sorted(each for each in pin.owners if isinstance(each, str)) if pin else []

    def tenant_of(self, revision_id: str) -> str:
        """In whose turn a pinned revision is loaded again; empty if no tenant has pinned it."""
        return next(iter(self.tenants_of(revision_id)), "")

    def add(self, revision_id: str, num_bytes: int, owner: Hashable) -> None:
        """Add an owner. Raises PinsExceedBudget."""
        pin = self._pins.get(revision_id)
        others = self.num_bytes - (pin.num_bytes if pin else 0)
        if others + num_bytes > self._budget_bytes:
            raise PinsExceedBudget(
                f"{revision_id} takes {num_bytes} bytes of host memory and {others} are pinned already, together more "
                f"than residency.host_bytes of {self._budget_bytes}; unpin others or raise it"
            )
        if pin is None:
            pin = self._pins[revision_id] = _Pin(num_bytes)
        pin.num_bytes = num_bytes
        pin.owners.add(owner)

    def release(self, revision_id: str, *owners: Hashable) -> None:
        """Remove owners, if they own the revision."""
        if (pin := self._pins.get(revision_id)) is None:
            return
        pin.owners.difference_update(owners)
        if not pin.owners:
            del self._pins[revision_id]
            self._on_unpinned()

    @contextmanager
    def pinning(self, revision_id: str, num_bytes: int, owner: Hashable) -> Iterator[None]:
        """Pin for a call that makes the revision resident: in the block for the call, then, on success, for `owner`.

        Raises PinsExceedBudget on entry.
        """
        call = object()
        self.add(revision_id, num_bytes, call)
        try:
            yield
            self.add(revision_id, num_bytes, owner)
        finally:
            self.release(revision_id, call)
