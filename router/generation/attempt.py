"""One attempt of one sequence: a single engine call, or those of a pair side by side, from start to last event."""

import asyncio
from collections.abc import Callable

from router.errors import (
    AttemptError,
    BrokenAnswer,
    DeadlineExceeded,
    EngineAborted,
    EngineRefusal,
    RouterError,
)
from router.fleet.fleet import Fleet
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_errors import engine_error
from router.generation.client_answer import ClientAnswer
from router.generation.engine_calls import EngineCall
from router.protocol.sse import DONE, FAILURE_WORDS, USAGE_END, error_in, is_aborted

_END_S = 1.0  # from a stream's last event to the end of the engine's answer
_PREFILL_END_S = 1.0  # for prefill's answer, if decode's was complete before it


class _Gap:
    """Calls `fail` if nothing happens for too long. Uses one timer per stream, not one per event."""

    __slots__ = ("_fail", "_gap_s", "_loop", "_timer", "last_at", "now")

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self.last_at = 0.0  # by `now`
        self._gap_s = 0.0
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, gap_s: float) -> None:
        """Require that `last_at` advances at least every `gap_s`, until `end`."""
        self._gap_s = gap_s
        self.end()
        self._check()

    def end(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        left_s = self.last_at + self._gap_s - self.now()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        else:  # perhaps the client does not read
            self._fail(DeadlineExceeded(f"no event for {self._gap_s:g} s"))


class Attempt:
    """Owns the engine call whose output goes to the client. `PairAttempt` adds the call to a prefill worker.

    The owner of an attempt must always await `end`.
    """

    def __init__(self, fleet: Fleet, call: EngineCall, *, is_streaming: bool, progress_timeout_s: float) -> None:
        self._fleet = fleet
        self._call = call
        self._is_streaming = is_streaming
        self._progress = fleet.check_progress(self._workers(), progress_timeout_s, call.fail)
        self._is_complete = False  # the whole output has arrived
        self._deadline: asyncio.TimerHandle | None = None  # of `begin`
        call.start(wants_stream=is_streaming)
        self._watch = fleet.watch(call.worker, call.fail)

    async def begin(self, *, first_event_timeout_s: float, answer_timeout_s: float) -> bytes:
        """The first events, or the whole answer if it is not streamed. Raises AttemptError or DeadlineExceeded."""
        self._expect_output(first_event_timeout_s if self._is_streaming else answer_timeout_s)
        return self._begun(await self._output())

    async def relay(
        self,
        first: bytes,
        write: Callable[[bytes], None],
        client: ClientAnswer,
        *,
        event_gap_timeout_s: float,
        take_usage: Callable[[bytes], bytes],
    ) -> bytes:
        """Pass `first` and all further events to `write`, except the last ones, with [DONE], which are returned.

        `take_usage` gets the events that may include the usage event, and returns those for the client, if any. While
        the client does not read, the engine's transport is paused. Raises AttemptError or DeadlineExceeded.
        """
        gap = _Gap(self._call.fail)
        now, (error_word, abort_word) = gap.now, FAILURE_WORDS
        last = b""

        def deliver(events: bytes) -> None:  # for every event of every stream
            nonlocal last
            if error_word in events or abort_word in events:
                self._check(events)
            gap.last_at = now()
            if events.endswith(DONE):
                last = take_usage(events)
                gap.expect(_END_S)
            elif not events.endswith(USAGE_END) or (events := take_usage(events)):
                write(events)

        deliver(first)
        if not last:
            gap.expect(event_gap_timeout_s)
        try:
            ended = self._call.relay(deliver)
            with client.connection.fed_by(self._call):
                await ended
        except (AttemptError, DeadlineExceeded):
            if not last:  # else nothing is missing but the end of the connection's message
                raise
        finally:
            gap.end()
        if not last:
            raise BrokenAnswer("the stream ended before its last event", worker=self._call.worker.name)
        self._is_complete = True
        return last

    async def end(self) -> None:
        """Stop everything that still runs. Closes connections and starts aborts before its first await. Idempotent."""
        self._watch.end()
        self._progress.end()
        self._call.leave()

    def _workers(self) -> tuple[WorkerView, ...]:
        """The workers that the output depends on. The attempt has stalled if none of them makes progress."""
        return (self._call.worker,)

    async def _output(self) -> bytes:
        try:
            return await self._call.output
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    def _expect_output(self, timeout_s: float) -> None:
        """Fail the call if its output has not arrived within this time. Replaces an earlier deadline."""
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
        """Check the first output. From then on, neither lost contact nor a suspected hang ends the attempt."""
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
        self._prefill_watch = fleet.watch(prefill.worker, decode.fail)
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
            asked = self._prefill.output
            if asked.done() and not asked.cancelled() and isinstance(refusal := asked.exception(), EngineRefusal):
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
