"""One try of one sequence on one pair of workers: both legs at once, until decode's first word."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.engines import Leg
from router.errors import BrokenAnswer, DeadlineExceeded, EngineAborted, EngineRefusal, WorkerLost
from router.fleet import Fleet
from router.placement import Pair
from router.relay import DONE, error_in, is_aborted
from router.worker_errors import engine_error

_LAST_WORD_S = 1.0  # for prefill's answer, when decode's was complete before it


class Attempt:
    """Owns both legs. Whoever calls `begin` calls `end`, whatever happens in between."""

    def __init__(self, fleet: Fleet, pair: Pair, prefill: Leg, decode: Leg, *, is_streaming: bool) -> None:
        self._prefill = prefill
        self._decode = decode
        self._is_streaming = is_streaming
        self._is_complete = False  # decode said everything
        self._loss: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        self._prefill_watch = fleet.watch(pair.prefill, self._lose)
        self._decode_watch = fleet.watch(pair.decode, self._lose)
        self._prefill_task = asyncio.create_task(self._prefill_answer(), name=f"prefill {prefill.rid}")
        self._decode_task = asyncio.create_task(self._decode_begin(), name=f"decode {decode.rid}")

    async def begin(self, *, first_event_timeout_s: float, answer_timeout_s: float) -> bytes:
        """Decode's first events, or its whole answer when it is not streamed.

        Prefill's failure is ours as long as decode has not spoken; later it no longer matters.
        Raises ExchangeError or DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        waiting: set[asyncio.Future[Any]] = {self._prefill_task, self._decode_task, self._loss}
        try:
            async with asyncio.timeout(first_event_timeout_s) as deadline:
                while True:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if self._prefill_task in done and isinstance(self._prefill_task.exception(), EngineRefusal):
                        await self._prefill_task  # the truest answer, whatever decode makes of it
                    if self._decode_task in done:
                        first = await self._decode_task
                        self._prefill_watch.end()
                        self._decode_watch.needs_contact = False
                        return first
                    if self._prefill_task in done:
                        await self._prefill_task
                        self._prefill_watch.end()
                        if not self._is_streaming:  # decode is at work now, as in a stream after its first event
                            self._decode_watch.needs_contact = False
                            deadline.reschedule(loop.time() + answer_timeout_s)
                    if self._loss in done:
                        raise self._loss.result()
        except TimeoutError:
            waited_for = "the first token" if self._is_streaming or not self._prefill_task.done() else "the answer"
            raise DeadlineExceeded(f"{waited_for} did not come in time") from None

    async def prefill_answer(self, timeout_s: float) -> bytes:
        """Prefill's answer, for what only it knows. Raises ExchangeError or DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._prefill_task
        except TimeoutError:
            raise DeadlineExceeded("the prefill worker did not answer in time") from None

    async def relay(
        self, first: bytes, write: Callable[[bytes], Awaitable[None]], *, event_gap_timeout_s: float
    ) -> None:
        """Hand `first` and all further events to `write`. Raises ExchangeError or DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        events: bytes | None = first
        is_done = False
        try:
            async with asyncio.timeout(event_gap_timeout_s) as deadline:  # a client that does not read counts too
                while events is not None:
                    self._check(events)
                    await write(events)
                    is_done = events.endswith(DONE)
                    deadline.reschedule(loop.time() + event_gap_timeout_s)
                    events = await self._decode.events()
        except TimeoutError:
            raise DeadlineExceeded(f"no event for {event_gap_timeout_s:g} s") from None
        if not is_done:
            raise BrokenAnswer("the stream ended before its last event", worker=self._decode.worker.name)
        self._is_complete = True

    async def end(self) -> None:
        """Stop what is left: connections are closed and engines told before this first waits. Idempotent."""
        self._prefill_watch.end()
        self._decode_watch.end()
        if self._is_complete and not self._prefill_task.done():
            await asyncio.wait({self._prefill_task}, timeout=_LAST_WORD_S)
        self._prefill_task.cancel()
        self._decode_task.cancel()
        self._prefill.leave()
        self._decode.leave()
        await asyncio.gather(self._prefill_task, self._decode_task, return_exceptions=True)

    async def _prefill_answer(self) -> bytes:
        answer = await self._prefill.answer()
        if is_aborted(answer):
            raise EngineAborted("the prefill worker gave the request up", worker=self._prefill.worker.name)
        self._prefill.leave()
        return answer

    async def _decode_begin(self) -> bytes:
        if self._is_streaming:
            await self._decode.begin()
            first = await self._decode.events()
            if first is None:
                raise BrokenAnswer("the stream ended before its first event", worker=self._decode.worker.name)
        else:
            first = await self._decode.answer()
            self._is_complete = True
        self._check(first)
        return first

    def _check(self, data: bytes) -> None:
        """Raises when the engine says, inside a 200, that the sequence failed."""
        if is_aborted(data):
            raise EngineAborted("the decode worker gave the request up", worker=self._decode.worker.name)
        if error := error_in(data):
            raise engine_error(200, error, self._decode.worker.name)

    def _lose(self, error: WorkerLost) -> None:
        if not self._loss.done():
            self._loss.set_result(error)
        self._decode.fail(error)
