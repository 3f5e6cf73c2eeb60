"""Loads as scheduled work: one per key however many wait for it, so many at once, so many in all.

A load lives as long as somebody waits for it. Between two attempts it holds no place among those that run, but it
does count in the bound. Everything happens on one event loop, whose clock is the only one that is read.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import heapq
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from adapters.errors import AdapterError
from prefill_worker.residency.errors import LoadQueueFull

_FIRST_GUESS_S = 1.0  # of a load's duration, before there was one
_GUESS_WEIGHT = 0.2  # of the latest load in the running mean
_RETRY_AFTER_S = (0.1, 30.0)  # the least and the most that a full queue tells


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts: doubling up to a bound, each a random part between half and all of it."""

    first_s: float = 0.1
    most_s: float = 2.0

    def pause_s(self, attempt: int, chance: random.Random) -> float:
        """After the attempt number `attempt`, the first being 1."""
        return min(self.first_s * 2.0 ** min(attempt - 1, 60), self.most_s) * chance.uniform(0.5, 1.0)


@dataclass(eq=False, slots=True)
class Load:
    """One key's load, as its loader sees it."""

    key: str
    goal: int  # the highest that any waiter asked for; it can rise while the load runs
    is_prewarm: bool  # nobody but prewarms waits for it
    number: int  # in order of arrival
    attempts: int = 0
    problem: AdapterError | None = None  # what it waits for to pass: the answer to waiters whose deadline comes first
    waiters: dict[asyncio.Future[None], float] = field(default_factory=dict)  # and their deadlines
    task: asyncio.Task[None] | None = None  # of the attempt that runs
    retry: asyncio.TimerHandle | None = None
    is_given_up: bool = False  # nobody waits any more: nobody can join it either
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> tuple[bool, int]:
        return self.is_prewarm, self.number


class LoadQueue:
    """Runs `load` for each key that is waited for. Requests come before prewarms, then who came first."""

    def __init__(
        self,
        load: Callable[[Load], Awaitable[None]],
        *,
        parallel: int,
        queued: int,
        backoff: Backoff | None = None,
        seed: int | None = None,
    ) -> None:
        self._load = load
        self._parallel = parallel
        self._most = parallel + queued
        self._backoff = backoff or Backoff()
        self._chance = random.Random(seed)
        self._loads: dict[str, Load] = {}
        self._ready: list[tuple[tuple[bool, int], Load]] = []  # a heap; entries of loads that changed rank are stale
        self._num_running = 0
        self._mean_s = _FIRST_GUESS_S
        self._numbers = itertools.count()
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_queued(self) -> int:
        """Loads that wait for their turn or for their next attempt."""
        return len(self._loads) - self._num_running

    @property
    def num_waiters(self) -> int:
        return sum(len(load.waiters) for load in self._loads.values())

    @property
    def keys(self) -> list[str]:
        """Of all loads, in the order of their arrival."""
        return list(self._loads)

    def __contains__(self, key: str) -> bool:
        return key in self._loads

    @property
    def retry_after_s(self) -> float:
        """When there may be a free place, judged by how long loads took."""
        least, most = _RETRY_AFTER_S
        return min(max(self._mean_s * len(self._loads) / self._parallel, least), most)

    async def wait(self, key: str, deadline_s: float, *, goal: int = 0, is_prewarm: bool = False) -> None:
        """Return once a load of the key that knew of this goal has ended.

        Raises what the load raised, an error of the waiter's own; LoadQueueFull; at the deadline the error that
        attempts have met so far, else TimeoutError. Cancelling it, or its deadline, gives up the load if nobody else
        waits for it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        async with asyncio.timeout_at(deadline):
            while (load := self._loads.get(key)) is not None and load.is_given_up:
                await load.ended.wait()
        if load is None:
            load = self._admit(key, goal, is_prewarm)
        load.goal = max(load.goal, goal)
        if load.is_prewarm and not is_prewarm:
            load.is_prewarm = False
            self._offer_again(load)
        done: asyncio.Future[None] = loop.create_future()
        load.waiters[done] = deadline
        self._start_what_can()
        try:
            async with asyncio.timeout_at(deadline):
                await done
        except TimeoutError:
            if load.problem is not None:
                raise copy.copy(load.problem) from None
            raise
        finally:
            load.waiters.pop(done, None)
            if done.done() and not done.cancelled():
                done.exception()  # seen, even if this waiter left at the same moment
            if not load.waiters and not load.ended.is_set():
                self._give_up(load)

    async def ended(self, key: str) -> None:
        """Return when there is no load of the key."""
        while (load := self._loads.get(key)) is not None:
            await load.ended.wait()

    async def idle(self) -> None:
        """Return when there is no load."""
        await self._is_idle.wait()

    async def aclose(self) -> None:
        """End all loads; who waits is told to try elsewhere."""
        self._is_closed = True
        tasks = []
        for load in list(self._loads.values()):
            if load.task is not None:
                tasks.append(load.task)
                load.task.cancel()
            else:
                self._end(load, _stopping())
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the callbacks of those tasks

    def _admit(self, key: str, goal: int, is_prewarm: bool) -> Load:
        if self._is_closed:
            raise _stopping()
        if len(self._loads) >= self._most:
            prewarms = [load for load in self._loads.values() if load.is_prewarm and load.task is None]
            if is_prewarm or not prewarms:
                raise self._full()
            self._end(max(prewarms, key=lambda load: load.number), self._full())
        load = Load(key, goal, is_prewarm, next(self._numbers))
        self._loads[key] = load
        self._is_idle.clear()
        heapq.heappush(self._ready, (load.rank, load))
        return load

    def _full(self) -> LoadQueueFull:
        return LoadQueueFull(
            f"{len(self._loads)} adapters are being loaded or wait for it, no more may (residency.parallel_loads and "
            f"queued_loads); try again in {self.retry_after_s:.1f} s",
            self.retry_after_s,
        )

    def _offer_again(self, load: Load) -> None:
        """Put a load that waits for its turn where its new rank is."""
        if load.task is None and load.retry is None:
            heapq.heappush(self._ready, (load.rank, load))

    def _start_what_can(self) -> None:
        while self._ready and self._num_running < self._parallel:
            rank, load = heapq.heappop(self._ready)
            if rank != load.rank or load.ended.is_set() or load.task is not None or load.retry is not None:
                continue
            self._num_running += 1
            load.attempts += 1
            started_at = asyncio.get_running_loop().time()
            load.task = asyncio.create_task(self._attempt(load), name=f"load {load.key}")
            load.task.add_done_callback(functools.partial(self._attempted, load, started_at))

    async def _attempt(self, load: Load) -> None:
        await self._load(load)

    def _attempted(self, load: Load, started_at: float, task: asyncio.Task[None]) -> None:
        load.task = None
        self._num_running -= 1
        now = task.get_loop().time()
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._end(load, _stopping())  # nobody waits, unless all is being stopped
        elif error is None:
            self._mean_s += _GUESS_WEIGHT * (now - started_at - self._mean_s)
            self._end(load, None)
        elif isinstance(error, AdapterError) and error.retryable and not load.is_given_up and not self._is_closed:
            self._try_later(load, error.with_traceback(None), now)
        else:
            self._end(load, error.with_traceback(None))
        self._start_what_can()

    def _try_later(self, load: Load, error: AdapterError, now: float) -> None:
        """Wait for the next attempt with those whose deadline allows for it; the others have their answer."""
        pause_s = self._backoff.pause_s(load.attempts, self._chance)
        for done, deadline in load.waiters.items():
            if deadline <= now + pause_s:
                _settle(done, error)
        if all(done.done() for done in load.waiters):
            self._end(load, error)
            return
        load.problem = error
        load.retry = asyncio.get_running_loop().call_later(pause_s, self._try_now, load)

    def _try_now(self, load: Load) -> None:
        load.retry = None
        heapq.heappush(self._ready, (load.rank, load))
        self._start_what_can()

    def _give_up(self, load: Load) -> None:
        load.is_given_up = True
        if load.task is not None:
            load.task.cancel()
        else:
            self._end(load, None)

    def _end(self, load: Load, error: BaseException | None) -> None:
        if load.retry is not None:
            load.retry.cancel()
            load.retry = None
        if self._loads.get(load.key) is load:
            del self._loads[load.key]
            if not self._loads:
                self._is_idle.set()
        load.ended.set()
        load.problem = None
        for done in load.waiters:
            _settle(done, error)


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(copy.copy(error))  # one of the waiter's own: raising adds to an error's traceback


def _stopping() -> LoadQueueFull:
    return LoadQueueFull("the worker is stopping and loads no more adapters; ask another one", 1.0)
