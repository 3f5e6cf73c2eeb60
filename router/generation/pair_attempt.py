"""One attempt of one sequence on a pair of workers: the prefill call and the decode call, side by side."""

from __future__ import annotations

import asyncio
from typing import Any

from router.errors import DeadlineExceeded, EngineAborted, EngineRefusal
from router.fleet.fleet import Fleet
from router.generation.attempt import Attempt
from router.generation.engine_calls import EngineCall
from router.protocol.sse import is_aborted

_PREFILL_END_S = 1.0  # for prefill's answer, if decode's was complete before it


class PairAttempt(Attempt):
    """Owns both engine calls; the client gets the output of the decode call."""

    def __init__(self, fleet: Fleet, prefill: EngineCall, decode: EngineCall, *, is_streaming: bool) -> None:
        self._prefill = prefill
        self._prefill_task = asyncio.create_task(self._prefill_answer(), name=f"prefill {prefill.rid}")
        super().__init__(fleet, decode, is_streaming=is_streaming)
        self._prefill_watch = fleet.watch(prefill.worker, self._lose)

    async def begin(self, *, first_event_timeout_s: float, answer_timeout_s: float) -> bytes:
        """Decode's first events, or its whole answer if it is not streamed.

        A failure of the prefill call ends the attempt until decode's first output; later it is ignored.
        Raises AttemptError or DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        waiting: set[asyncio.Future[Any]] = {self._prefill_task, self._task, self._loss}
        try:
            async with asyncio.timeout(first_event_timeout_s) as deadline:
                while True:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if self._prefill_task in done and isinstance(self._prefill_task.exception(), EngineRefusal):
                        # Its message is about the request, where decode may only report an abort.
                        await self._prefill_task
                    if self._task in done:
                        first = await self._begun()
                        self._prefill_watch.end()
                        return first
                    if self._prefill_task in done:
                        await self._prefill_task
                        self._prefill_watch.end()
                        if not self._is_streaming:  # decode generates now, as in a stream after its first event
                            self._watch.needs_contact = False
                            deadline.reschedule(loop.time() + answer_timeout_s)
                    if self._loss in done:
                        raise self._loss.result()
        except TimeoutError:
            waited_for = "the first token" if self._is_streaming or not self._prefill_task.done() else "the answer"
            raise DeadlineExceeded(f"{waited_for} did not come in time") from None

    async def prefill_answer(self, timeout_s: float) -> bytes:
        """Prefill's answer, which has the prompt's log-probabilities. Raises AttemptError or DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._prefill_task
        except TimeoutError:
            raise DeadlineExceeded("the prefill worker did not answer in time") from None

    async def end(self) -> None:
        """Stop what is left of both calls, as `Attempt.end` does."""
        self._prefill_watch.end()
        self._watch.end()
        try:
            if self._is_complete and not self._prefill_task.done():
                await asyncio.wait({self._prefill_task}, timeout=_PREFILL_END_S)
        finally:  # also if the client disconnects meanwhile
            self._prefill_task.cancel()
            self._prefill.leave()
            await super().end()
            await asyncio.gather(self._prefill_task, return_exceptions=True)

    async def _prefill_answer(self) -> bytes:
        answer = await self._prefill.answer()
        if is_aborted(answer):
            raise EngineAborted("the prefill worker gave the request up", worker=self._prefill.worker.name)
        self._prefill.leave()
        return answer
