"""Runs loads with bounded concurrency and a bounded queue: one load per key, shared by all its waiters.

A load is abandoned with its last waiter. During a retry pause it takes no slot among the running loads but still counts
against the queue's bound. Everything runs on one event loop and uses its clock.
"""

import asyncio
import copy
import functools
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

from adapters.errors import AdapterError
from prefill_worker.residency.errors import LoadQueueFull
from prefill_worker.residency.loading.turns import Load, Turns
from process.tracing.span import NO_SPAN, Span

_INITIAL_MEAN_S = 1.0  # assumed duration of a load before the first one
_MEAN_WEIGHT = 0.2  # of the latest load in the moving average
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0  # between attempts
_RETRY_AFTER_S = (0.1, 30.0)  # bounds of the retry-after of a full queue


def pause_s(attempt: int, jitter: random.Random) -> float:
    """The pause after attempt number `attempt`, which begins at 1: doubled at each, a random half of it left out."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 60), _LAST_PAUSE_S) * jitter.uniform(0.5, 1.0)


class LoadQueue:
    """Runs `load` for each key with a waiter. Requests take priority over prewarms; then tenants take turns."""

    def __init__(
        self,
        load: Callable[[Load], Coroutine[Any, Any, None]],
        *,
        parallel: int,
        queued: int,
        seed: int | None = None,
    ) -> None:
        self._load = load
        self._parallel = parallel
        self._capacity = parallel + queued
        self._jitter = random.Random(seed)
        self._loads: dict[str, Load] = {}
        self._turns = Turns()
        self._num_running = 0
        self._mean_s = _INITIAL_MEAN_S
        self._numbers = itertools.count()
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_queued(self) -> int:
        """Loads that wait for a slot or for their next attempt."""
        return len(self._loads) - self._num_running

    @property
    def num_waiters(self) -> int:
        return sum(len(load.waiters) for load in self._loads.values())

    @property
    def keys(self) -> list[str]:
        """Keys of all loads, in order of arrival."""
        return list(self._loads)

    def __contains__(self, key: str) -> bool:
        return key in self._loads

    @property
    def retry_after_s(self) -> float:
        """When a place may be free, estimated from the mean duration of loads."""
        least, most = _RETRY_AFTER_S
        return min(max(self._mean_s * len(self._loads) / self._parallel, least), most)

    async def wait(
        self,
        key: str,
        deadline_s: float,
        *,
        is_prewarm: bool = False,
        tenant: str = "",
        span: Span = NO_SPAN,
    ) -> None:
        """Join or start the load of a key and wait until it ends.

        `tenant`: who waits; the load starts in the tenant's turn.

        Raises a copy of the load's error; LoadQueueFull; at the deadline the load's pending error, else TimeoutError.
        Cancellation and the deadline abandon the load if it has no other waiter.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        async with asyncio.timeout_at(deadline):
            while (load := self._loads.get(key)) is not None and load.is_abandoned:
                await load.ended.wait()
        if load is None:
            load = self._add(key, is_prewarm, tenant)
        if load.span is NO_SPAN:
            load.span = span
        else:
            span.link(load.span)
        self._turns.join(load, tenant, is_prewarm=is_prewarm)
        done: asyncio.Future[None] = loop.create_future()
        load.waiters[done] = deadline
        self._start_ready()
        try:
            async with asyncio.timeout_at(deadline):
                await done
        except TimeoutError:
            if load.pending_error is not None:
                raise copy.copy(load.pending_error) from None
            raise
        finally:
            load.waiters.pop(done, None)
            self._turns.leave(load, tenant)
            if done.done() and not done.cancelled():
                done.exception()  # marks it as retrieved, even if this waiter was cancelled at the same moment
            if not load.waiters and not load.ended.is_set():
                self._abandon(load)

    async def wait_until_ended(self, key: str) -> None:
        """Return when there is no load of the key."""
        while (load := self._loads.get(key)) is not None:
            await load.ended.wait()

    async def wait_until_idle(self) -> None:
        """Return when there is no load."""
        await self._is_idle.wait()

    async def aclose(self) -> None:
        """Cancel all loads; their waiters get LoadQueueFull."""
        self._is_closed = True
        tasks = []
        for load in list(self._loads.values()):
            if load.task is not None:
                tasks.append(load.task)
                load.task.cancel()
            else:
                self._finish(load, _stopping())
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets the tasks' callbacks run

    def _add(self, key: str, is_prewarm: bool, tenant: str) -> Load:
        if self._is_closed:
            raise _stopping()
        if len(self._loads) >= self._capacity:
            displaced = None if is_prewarm else self._latest_prewarm() or self._turns.excess(tenant)
            if displaced is None:
                raise self._full()
            self._finish(displaced, self._full())
        load = Load(key, is_prewarm, next(self._numbers), asyncio.get_running_loop().time())
        self._loads[key] = load
        self._is_idle.clear()
        self._turns.add(load)
        return load

    def _latest_prewarm(self) -> Load | None:
        prewarms = [load for load in self._loads.values() if load.is_prewarm and load.task is None]
        return max(prewarms, key=lambda load: load.number, default=None)

    def _full(self) -> LoadQueueFull:
        return LoadQueueFull(
            f"the load queue is full: {len(self._loads)} adapters are being loaded or queued (residency.parallel_loads "
            f"and queued_loads); try again in {self.retry_after_s:.1f} s",
            self.retry_after_s,
        )

    def _start_ready(self) -> None:
        while self._num_running < self._parallel and (load := self._turns.take()) is not None:
            self._num_running += 1
            load.attempts += 1
            started_at = asyncio.get_running_loop().time()
            if load.attempts == 1:
                load.span.stage("load queue", started_at - load.arrived_at)
            load.task = asyncio.create_task(self._load(load), name=f"load {load.key}")
            load.task.add_done_callback(functools.partial(self._on_attempt_done, load, started_at))

    def _on_attempt_done(self, load: Load, started_at: float, task: asyncio.Task[None]) -> None:
        load.task = None
        self._num_running -= 1
        now = task.get_loop().time()
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._finish(load, _stopping())  # abandoned, or the queue is closing
        elif error is None:
            self._mean_s += _MEAN_WEIGHT * (now - started_at - self._mean_s)
            self._finish(load, None)
        elif isinstance(error, AdapterError) and error.retryable and not load.is_abandoned and not self._is_closed:
            self._schedule_retry(load, error.with_traceback(None), now)
        else:
            self._finish(load, error.with_traceback(None))
        self._start_ready()

    def _schedule_retry(self, load: Load, error: AdapterError, now: float) -> None:
        """Retry after a pause, for the waiters whose deadline permits it; raise the error to the others."""
        pause = pause_s(load.attempts, self._jitter)
        for done, deadline in load.waiters.items():
            if deadline <= now + pause:
                _settle(done, error)
        if all(done.done() for done in load.waiters):
            self._finish(load, error)
            return
        load.pending_error = error
        load.retry = asyncio.get_running_loop().call_later(pause, self._retry, load)

    def _retry(self, load: Load) -> None:
        load.retry = None
        self._turns.add(load)
        self._start_ready()

    def _abandon(self, load: Load) -> None:
        load.is_abandoned = True
        if load.task is not None:
            load.task.cancel()
        else:
            self._finish(load, None)

    def _finish(self, load: Load, error: BaseException | None) -> None:
        self._turns.remove(load)
        if load.retry is not None:
            load.retry.cancel()
            load.retry = None
        if self._loads.get(load.key) is load:
            del self._loads[load.key]
            if not self._loads:
                self._is_idle.set()
        load.ended.set()
        load.pending_error = None
        for done in load.waiters:
            _settle(done, error)


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(copy.copy(error))  # a copy per waiter: raising extends the traceback


def _stopping() -> LoadQueueFull:
    return LoadQueueFull("the worker is stopping and loads no more adapters; ask another one", 1.0)
