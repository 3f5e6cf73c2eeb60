"""One attempt of one sequence on a unified worker: a single engine call, from its start to its last event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.errors import AttemptError, BrokenAnswer, DeadlineExceeded, EngineAborted, WorkerLost
from router.fleet.fleet import Fleet
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_errors import engine_error
from router.generation.client_answer import ClientAnswer
from router.generation.engine_calls import EngineCall
from router.protocol.sse import DONE, FAILURE_WORDS, error_in, is_aborted

_END_S = 1.0  # from a stream's last event to the end of the engine's answer


class Attempt:
    """Owns the engine call whose output the client gets. `PairAttempt` adds the call to a prefill worker.

    The owner of an attempt must await `end`, whatever happened before.
    """

    def __init__(self, fleet: Fleet, call: EngineCall, *, is_streaming: bool, progress_timeout_s: float) -> None:
        self._fleet = fleet
        self._call = call
        self._is_streaming = is_streaming
        self._progress = fleet.check_progress(self._workers(), progress_timeout_s, call.fail)
        self._is_complete = False  # the whole output has arrived
        self._deadline: asyncio.TimerHandle | None = None  # of `begin`
        call.start(wants_stream=is_streaming)
        self._watch = fleet.watch(call.worker, self._lose)

    async def begin(self, *, first_event_timeout_s: float, answer_timeout_s: float) -> bytes:
        """The first events, or the whole answer if it is not streamed. Raises AttemptError or DeadlineExceeded."""
        self._expect_output(first_event_timeout_s if self._is_streaming else answer_timeout_s)
        return self._begun(await self._output())

    async def relay(
        self, first: bytes, write: Callable[[bytes], None], client: ClientAnswer, *, event_gap_timeout_s: float
    ) -> bytes:
        """Hand `first` and all further events to `write`, except the last ones, with [DONE], which it returns.

        While the client does not read, the engine waits. Raises AttemptError or DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        now, (error_word, abort_word) = loop.time, FAILURE_WORDS
        timer: asyncio.TimerHandle | None = None
        last, last_at, gap_s = b"", 0.0, event_gap_timeout_s

        def deliver(events: bytes) -> None:  # for every event of every stream
            nonlocal last, last_at, gap_s, timer
            if error_word in events or abort_word in events:
                self._check(events)
            last_at = now()
            if events.endswith(DONE):
                last, gap_s = events, _END_S
                if timer is not None:
                    timer.cancel()
                check_gap()
            else:
                write(events)

        def check_gap() -> None:  # one timer per stream and gap, not one per event
            nonlocal timer
            left_s = last_at + gap_s - now()
            if left_s > 0:
                timer = loop.call_later(left_s, check_gap)
            else:  # perhaps the client does not read
                self._call.fail(DeadlineExceeded(f"no event for {gap_s:g} s"))

        deliver(first)
        if timer is None:
            check_gap()
        try:
            ended = self._call.relay(deliver)
            with client.fed_by(self._call):
                await ended
        except (AttemptError, DeadlineExceeded):
            if not last:  # else nothing is missing but the end of the connection's message
                raise
        finally:
            if timer is not None:
                timer.cancel()
        if not last:
            raise BrokenAnswer("the stream ended before its last event", worker=self._call.worker.name)
        self._is_complete = True
        return last

    async def end(self) -> None:
        """Stop what is left. Closes connections and starts aborts before it first waits. Idempotent."""
        self._watch.end()
        self._progress.end()
        self._call.leave()

    def _workers(self) -> tuple[WorkerView, ...]:
        """The workers whose progress the output waits for; it has stalled when none of them makes any."""
        return (self._call.worker,)

    async def _output(self) -> bytes:
        try:
            return await self._call.output
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    def _expect_output(self, timeout_s: float) -> None:
        """Let the call fail if its output has not come by then. Replaces an earlier deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        # Not `asyncio.timeout`, which costs a request several times as much.
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._fail_overdue)

    def _fail_overdue(self) -> None:
        if not self._call.output.done():
            self._call.fail(DeadlineExceeded(f"{self._awaited} did not come in time"))

    @property
    def _awaited(self) -> str:
        return "the first token" if self._is_streaming else "the answer"

    def _begun(self, first: bytes) -> bytes:
        """The first output, checked. From now on neither losing contact with the agent nor a hang ends anything."""
        self._is_complete = not self._is_streaming
        self._check(first)
        self._watch.needs_contact = self._watch.needs_progress = False
        self._progress.end()
        self._fleet.breaker(self._call.worker.name).succeeded()
        self._call.span.event("first token" if self._is_streaming else "answer")
        self._call.prompt_was_read()
        return first

    def _check(self, data: bytes) -> None:
        """Raises AttemptError if the engine reports, inside a 200, that the sequence failed."""
        worker = self._call.worker
        if is_aborted(data):
            raise EngineAborted(f"the {worker.role} worker gave the request up", worker=worker.name)
        if error := error_in(data):
            raise engine_error(200, error, worker.name)

    def _lose(self, error: WorkerLost) -> None:
        self._call.fail(error)
