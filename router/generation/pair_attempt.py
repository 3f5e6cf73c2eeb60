"""One attempt of one sequence on a pair of workers: the prefill call and the decode call, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.errors import DeadlineExceeded, EngineAborted, EngineRefusal, RouterError
from router.fleet.fleet import Fleet
from router.fleet.fleet_state import WorkerView
from router.generation.attempt import Attempt
from router.generation.engine_calls import EngineCall
from router.protocol.sse import is_aborted

_PREFILL_END_S = 1.0  # for prefill's answer, if decode's was complete before it


class PairAttempt(Attempt):
    """Owns both engine calls; the client gets the output of the decode call."""

    def __init__(
        self,
        fleet: Fleet,
        prefill: EngineCall,
        decode: EngineCall,
        *,
        is_streaming: bool,
        progress_timeout_s: float,
        on_prefill_answer: Callable[[bytes], None],
    ) -> None:
        self._prefill = prefill
        self._observe_prefill = on_prefill_answer
        self._answer_timeout_s = 0.0
        prefill.start()
        super().__init__(fleet, decode, is_streaming=is_streaming, progress_timeout_s=progress_timeout_s)
        self._prefill_watch = fleet.watch(prefill.worker, self._lose)
        prefill.output.add_done_callback(self._on_prefill_answer)

    async def begin(self, *, first_event_timeout_s: float, answer_timeout_s: float) -> bytes:
        """Decode's first events, or its whole answer if it is not streamed.

        A failure of the prefill call ends the attempt until decode's first output; later it is ignored.
        Raises AttemptError or DeadlineExceeded.
        """
        self._answer_timeout_s = answer_timeout_s
        self._expect_output(first_event_timeout_s)
        try:
            first = self._begun(await self._output())
        except RouterError:
            # A refusal's message is about the request, where decode may only report an abort.
            if isinstance(refusal := _error_of(self._prefill.output), EngineRefusal):
                raise refusal from None
            raise
        self._prefill_watch.end()
        return first

    async def prefill_answer(self, timeout_s: float) -> bytes:
        """Prefill's answer, which has the prompt's log-probabilities. Raises AttemptError or DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._prefill.output
        except TimeoutError:
            raise DeadlineExceeded("the prefill worker did not answer in time") from None
        self._check_prefill(answer)
        return answer

    async def end(self) -> None:
        """Stop what is left of both calls, as `Attempt.end` does."""
        self._prefill_watch.end()
        self._watch.end()
        self._progress.end()
        try:
            if self._is_complete and not self._prefill.output.done():
                await asyncio.wait({self._prefill.output}, timeout=_PREFILL_END_S)
        finally:  # also if the client disconnects meanwhile
            self._prefill.leave()
            await super().end()

    def _workers(self) -> tuple[WorkerView, ...]:
        return self._prefill.worker, self._call.worker

    def _on_prefill_answer(self, output: asyncio.Future[bytes]) -> None:
        if output.cancelled():
            return
        error = output.exception()
        if error is None:
            answer = output.result()
            try:
                self._check_prefill(answer)
                self._prefill.prompt_was_read()
                self._fleet.breaker(self._prefill.worker.name).succeeded()
                self._observe_prefill(answer)
            except EngineAborted as aborted:
                error = aborted
            self._prefill.leave()
        if self._call.output.done():
            return
        if error is not None:
            self._call.fail(error)
            return
        self._prefill_watch.end()
        if not self._is_streaming:  # decode generates now, as in a stream after its first event
            self._watch.needs_contact = False
            if self._deadline is not None:
                self._expect_output(self._answer_timeout_s)

    @property
    def _awaited(self) -> str:
        return "the first token" if self._is_streaming or not self._prefill.output.done() else "the answer"

    def _check_prefill(self, answer: bytes) -> None:
        if is_aborted(answer):
            raise EngineAborted("the prefill worker gave the request up", worker=self._prefill.worker.name)


def _error_of(future: asyncio.Future[bytes]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None
