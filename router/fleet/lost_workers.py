"""How requests learn that a worker fails: a circuit breaker per worker, watches of lost engines, checks of progress.

After consecutive failures, a breaker lets no requests pass to its worker for a while, then one probe at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.errors import WorkerGaveBack, WorkerLost, WorkerStalled
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_loads import WorkerLoad

_FAILURES = 3  # in a row
_APART_S = 0.5  # transfers that fail within this time may be those to one peer that has ended: they count once
_FIRST_REST_S, _LAST_REST_S = 1.0, 8.0  # doubled at each failed probe
_CHECKS = 4  # of progress, per timeout

Loss = Callable[[WorkerLost], None]

log = logging.getLogger(__name__)


class Breaker:
    """Counts failures that this router sees at one worker's engine: broken connections, no progress, and KV transfers.

    Any other answer counts as a success, whatever its status, since a bad request can fail at a healthy engine. A
    transfer that fails counts at both workers of the pair: success with other peers resets the healthy one.

    Closed: requests pass. Open: no request passes for some time. Half open: one request passes as a probe, and its
    outcome closes or opens the breaker.
    """

    def __init__(self, worker: str, on_change: Callable[[], None]) -> None:
        self.is_blocking = False
        self._worker = worker
        self._on_change = on_change
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S
        self._is_half_open = False  # the next request is the probe
        self._is_probed = False  # the probe is on its way
        self._timer: asyncio.TimerHandle | None = None
        self._transfer_failed_at = -_APART_S

    def transfer_failed(self) -> None:
        """Note an answer that says that a KV transfer from or to the worker has failed."""
        now = asyncio.get_running_loop().time()
        if now - self._transfer_failed_at >= _APART_S:
            self._transfer_failed_at = now
            self.failed()

    def failed(self) -> None:
        """Note a broken call, or a request there that makes no progress."""
        self._num_failures += 1
        if self._num_failures < _FAILURES or (self._timer is not None and not self._is_probed):
            return  # calls that had begun before it was blocked
        self._stop_timer()
        fields = {"worker": self._worker, "failures": self._num_failures, "rest_s": self._rest_s}
        log.warning("worker blocked", extra={"fields": fields})
        self._timer = asyncio.get_running_loop().call_later(self._rest_s, self._half_open)
        self._rest_s = min(2 * self._rest_s, _LAST_REST_S)
        self._is_half_open = self._is_probed = False
        self._set(True)

    def succeeded(self) -> None:
        """The engine has answered."""
        if self._num_failures:
            self.reset()

    def placed(self) -> None:
        """Note a request that was sent to the worker. A probe holds others off until its outcome or the next one."""
        if self._is_half_open:
            self._is_half_open, self._is_probed = False, True
            self._timer = asyncio.get_running_loop().call_later(self._rest_s, self._half_open)
            self._set(True)

    def reset(self) -> None:
        """Forget all failures, because the worker has a new engine."""
        self._num_failures, self._rest_s = 0, _FIRST_REST_S
        self._is_half_open = self._is_probed = False
        self._stop_timer()
        self._set(False)

    def _half_open(self) -> None:
        self._timer = None
        self._is_half_open, self._is_probed = True, False
        self._set(False)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, is_blocking: bool) -> None:
        if is_blocking != self.is_blocking:
            self.is_blocking = is_blocking
            self._on_change()


class Watch:
    """Calls back once if one engine is lost. Active until `end`."""

    def __init__(self, watches: set[Watch], view: WorkerView, on_loss: Loss) -> None:
        self.needs_contact = True  # losing contact with the agent counts as a loss, too
        self.needs_progress = True  # and so does an engine that hangs
        self._watches = watches
        self._incarnation = view.incarnation
        self._on_loss: Loss | None = on_loss
        watches.add(self)

    def end(self) -> None:
        """Idempotent. Drops the callback, so that no reference cycle is left for the garbage collector."""
        self._watches.discard(self)
        self._on_loss = None

    def check(self, view: WorkerView) -> None:
        """Report a loss if the engine is down or has another incarnation.

        A running stream needs neither contact with the agent nor progress of the engine: it waits until a hanging
        engine recovers or is restarted. So set `needs_contact` and `needs_progress` to False for it.
        """
        kind = WorkerLost
        if view.is_connected:
            is_lost = not (view.is_engine_up and view.incarnation == self._incarnation)
            what = "the engine of worker {} went away"
            if not is_lost and view.is_hung:
                is_lost, what = self.needs_progress, "the engine of worker {} hangs"
            if not is_lost and view.gives_back and self.needs_contact:
                is_lost, kind, what = True, WorkerGaveBack, "worker {} changes its role"
        else:
            is_lost, what = self.needs_contact, "the router lost contact with worker {}"
        on_loss = self._on_loss
        if is_lost and on_loss is not None:
            self.end()
            on_loss(kind(what.format(view.name), worker=view.name))


@dataclass(frozen=True, slots=True)
class Observed:
    """The current state of one worker that a request waits for. It may have left since the request began."""

    name: str
    load: WorkerLoad
    has_contact: bool


class ProgressCheck:
    """Calls `on_stall`, once, when none of the workers has made progress for `timeout_s`. Active until `end`.

    Time without contact to one of the workers does not count, because its progress is unknown then. A check that runs
    late does not count either: this process was stalled, and must first read what workers have reported meanwhile.
    `observe` returns the workers and is called at each check; nearly all requests end before the first one.
    """

    def __init__(
        self,
        observe: Callable[[], tuple[Observed, ...]],
        clock: Callable[[], float],
        timeout_s: float,
        on_stall: Callable[[WorkerStalled], None],
    ) -> None:
        self._observe = observe
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._began_at = clock()
        self._loop = asyncio.get_running_loop()
        self._check_after(timeout_s)

    def end(self) -> None:
        """Idempotent."""
        self._timer.cancel()

    def _check_after(self, seconds: float) -> None:
        self._late_at = self._clock() + seconds + self._timeout_s / _CHECKS
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        workers = self._observe()
        if not all(worker.has_contact for worker in workers):
            self._began_at = self._clock()
        latest = max(self._began_at, *(worker.load.progressed_at for worker in workers))
        now = self._clock()
        if now - latest < self._timeout_s or now > self._late_at:
            self._check_after(self._timeout_s / _CHECKS)
            return
        names = tuple(worker.name for worker in workers)
        text = f"{' and '.join(names)} made no progress for {self._timeout_s:g} s"
        self._on_stall(WorkerStalled(text, workers=names))
