"""One attempt of one sequence on a unified worker: a single engine call, from its start to its last event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.errors import BrokenAnswer, DeadlineExceeded, EngineAborted, WorkerLost
from router.fleet.fleet import Fleet
from router.fleet.worker_errors import engine_error
from router.generation.engine_calls import EngineCall
from router.protocol.sse import DONE, error_in, is_aborted


class Attempt:
    """Owns the engine call whose output the client gets. `PairAttempt` adds the call to a prefill worker.

    The owner of an attempt must await `end`, whatever happened before.
    """

    def __init__(self, fleet: Fleet, call: EngineCall, *, is_streaming: bool) -> None:
        self._call = call
        self._is_streaming = is_streaming
        self._is_complete = False  # the whole output has arrived
        self._loss: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        self._watch = fleet.watch(call.worker, self._lose)
        self._task = asyncio.create_task(self._first_output(), name=f"{call.worker.role} {call.rid}")

    async def begin(self, *, first_event_timeout_s: float, answer_timeout_s: float) -> bytes:
        """The first events, or the whole answer if it is not streamed. Raises AttemptError or DeadlineExceeded."""
        timeout_s = first_event_timeout_s if self._is_streaming else answer_timeout_s
        outcomes: set[asyncio.Future[Any]] = {self._task, self._loss}
        await asyncio.wait(outcomes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            return await self._begun()
        if self._loss.done():
            raise self._loss.result()
        raise DeadlineExceeded(f"{'the first token' if self._is_streaming else 'the answer'} did not come in time")

    async def relay(
        self, first: bytes, write: Callable[[bytes], Awaitable[None]], *, event_gap_timeout_s: float
    ) -> None:
        """Hand `first` and all further events to `write`. Raises AttemptError or DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        events: bytes | None = first
        is_done = False
        try:
            async with asyncio.timeout(event_gap_timeout_s) as deadline:  # includes a client that does not read
                while events is not None:
                    self._check(events)
                    await write(events)
                    is_done = events.endswith(DONE)
                    deadline.reschedule(loop.time() + event_gap_timeout_s)
                    events = await self._call.events()
        except TimeoutError:
            raise DeadlineExceeded(f"no event for {event_gap_timeout_s:g} s") from None
        if not is_done:
            raise BrokenAnswer("the stream ended before its last event", worker=self._call.worker.name)
        self._is_complete = True

    async def end(self) -> None:
        """Stop what is left. Closes connections and starts aborts before it first waits. Idempotent."""
        self._watch.end()
        self._task.cancel()
        self._call.leave()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _begun(self) -> bytes:
        """The first output of a call that has it. From now on losing contact with the agent ends nothing."""
        first = await self._task
        self._watch.needs_contact = False
        return first

    async def _first_output(self) -> bytes:
        if self._is_streaming:
            await self._call.begin()
            first = await self._call.events()
            if first is None:
                raise BrokenAnswer("the stream ended before its first event", worker=self._call.worker.name)
        else:
            first = await self._call.answer()
            self._is_complete = True
        self._check(first)
        return first

    def _check(self, data: bytes) -> None:
        """Raises AttemptError if the engine reports, inside a 200, that the sequence failed."""
        worker = self._call.worker
        if is_aborted(data):
            raise EngineAborted(f"the {worker.role} worker gave the request up", worker=worker.name)
        if error := error_in(data):
            raise engine_error(200, error, worker.name)

    def _lose(self, error: WorkerLost) -> None:
        if not self._loss.done():
            self._loss.set_result(error)
        self._call.fail(error)
