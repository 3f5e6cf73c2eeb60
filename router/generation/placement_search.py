"""Finds a placement for each attempt of a sequence: the first one, and those after failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from adapters.store import RevisionNotStored
from router.errors import (
    AdapterNotResident,
    AdapterRefused,
    AdapterRevisionGone,
    AttemptError,
    RouterError,
    WorkerLost,
    WorkerStalled,
)
from router.fleet.fleet_state import FleetState
from router.generation.backends import Backends
from router.generation.request import Request
from router.placement.request import FailedAttempts, Placement, PlacementRequest, PromptSize
from router.placement.unplaceable import unplaceable_error

_RESIDENCY_LAG_S = 1.0  # a push may be in the catalog before its residency reaches this router

log = logging.getLogger(__name__)


class PlacementSearch:
    """Belongs to one sequence. Remembers what has failed and decides whether there is another attempt."""

    def __init__(self, backends: Backends, request: Request, size: PromptSize) -> None:
        """`size`: of the sequence's prompt."""
        self._backends = backends
        self._revision = request.revision
        self._request_id = request.request_id
        needs_decode, namespace = request.validated.generates, request.namespace
        wanted = PlacementRequest.of(request.revision, needs_decode=needs_decode, size=size, namespace=namespace)
        self.request = backends.placer.observe(wanted)
        self._failed = FailedAttempts()
        self._in_failures: frozenset[str] = frozenset()  # workers of the placements that have failed
        self._num_failed_attempts = 0
        config = backends.config
        self._retry_deadline = asyncio.get_running_loop().time() + config.first_event_timeout_s

    async def first(self, on_wait: Callable[[], None] | None = None) -> Placement:
        """A placement that can serve the sequence now. Raises RouterError.

        `on_wait` is called before waiting, if there is none yet. While it waits, the sequence takes no worker's room.
        """
        if (found := self._best_placement(self._backends.fleet.state)) is not None:
            return found
        if on_wait is not None:
            on_wait()

        def is_gone() -> bool:
            return isinstance(self._unplaceable_error(), AdapterRevisionGone)

        # A push may be in the catalog before this router knows that its workers have the revision.
        placement = await self._wait_for_placement(is_gone, _RESIDENCY_LAG_S)
        if placement is None:
            raise self._unplaceable_error()
        return placement

    async def after(self, error: AdapterRefused | AttemptError, placement: Placement) -> Placement:
        """The placement for the next attempt, after one at `placement` failed. Raises `error` if there is none."""
        self._num_failed_attempts += 1
        if isinstance(error, AdapterRefused):
            if not self._may_be_elsewhere(error):
                raise error
            self._failed = self._failed.with_placement(placement).with_worker(placement.prefill.name)
            return await self.first()

        self._note(error, placement)
        has_attempts = self._num_failed_attempts < self._backends.config.max_attempts
        found = await self._retry_placement() if error.retryable and has_attempts else None
        fields = {"request_id": self._request_id, "reason": str(error), "code": error.code, "retry": found is not None}
        log.info("attempt failed", extra={"fields": fields})
        if found is None:
            raise error
        self._backends.metrics.retries.labels(error.code).inc()
        return found

    def _may_be_elsewhere(self, error: AdapterRefused) -> bool:
        """True if a worker has lost a memory-only revision: another worker may still have it."""
        return self._revision is not None and not self._revision.stored and error.code == RevisionNotStored.code

    def _note(self, error: AttemptError, placement: Placement) -> None:
        if isinstance(error, AdapterNotResident):  # the same worker only has to load it again
            return
        blamed = set(error.workers if isinstance(error, WorkerStalled) else (error.worker,))
        # A pair's transfer may be reported by the one engine and be the other's fault: nobody fails twice unblamed.
        workers = {worker.name for worker in placement.workers}
        for name in blamed | (workers & self._in_failures):
            self._failed = self._failed.with_worker(name)
        self._in_failures |= workers
        if not isinstance(error, WorkerLost) or error.was_reached:
            self._failed = self._failed.with_placement(placement)

    async def _retry_placement(self) -> Placement | None:
        """A placement for a retry. May wait for a worker that has just lost contact, until the first event is due."""

        def would_have_one() -> bool:
            fleet = self._backends.fleet.state.with_late_workers(except_for=self._failed.workers)
            return self._best_placement(fleet) is not None

        left_s = self._retry_deadline - asyncio.get_running_loop().time()
        return await self._wait_for_placement(would_have_one, max(0.0, left_s))

    async def _wait_for_placement(self, is_expected: Callable[[], bool], timeout_s: float) -> Placement | None:
        """The best placement. If there is none, wait for one while `is_expected` holds, at most `timeout_s`."""
        fleet = self._backends.fleet
        placement = self._best_placement(fleet.state)
        if placement is None and is_expected():
            await fleet.wait_until(
                lambda: self._best_placement(fleet.state) is not None or not is_expected(), timeout_s
            )
            placement = self._best_placement(fleet.state)
        return placement

    def _best_placement(self, fleet: FleetState) -> Placement | None:
        return self._backends.placer.place(self.request, fleet, self._failed)

    def _unplaceable_error(self) -> RouterError:
        return unplaceable_error(self._revision, self._backends.fleet.state)
