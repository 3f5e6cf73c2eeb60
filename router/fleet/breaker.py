"""A circuit breaker per worker: after consecutive failures the worker gets no requests, then one probe at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_FAILURES = 3  # in a row
_APART_S = 0.5  # transfers that fail within this time may be those to one peer that has ended: they count once
_FIRST_REST_S, _LAST_REST_S = 1.0, 8.0  # doubled at each failed probe

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
