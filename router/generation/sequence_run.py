"""One sequence of a request: its placements, its adapter, its engine calls."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from adapters.store import RevisionNotStored
from process.tracing.span import NO_SPAN, Span
from router.errors import (
    AdapterNotResident,
    AdapterRefused,
    AdapterRevisionGone,
    AttemptError,
    EngineAborted,
    EngineFailure,
    EngineRefusal,
    RouterError,
    WorkerGaveBack,
    WorkerLost,
    WorkerStalled,
)
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.worker_loads import InFlightLoad
from router.generation.attempt import Attempt, PairAttempt
from router.generation.backends import Backends
from router.generation.client_answer import ClientAnswer
from router.generation.engine_bodies import Body, KvHandoff, decode_body, reader_body
from router.generation.engine_calls import EngineCall
from router.generation.request import Phase, Request, SequenceState
from router.generation.whole_answer import completed
from router.placement.placement import placements
from router.placement.placer import Reservation
from router.placement.request import FailedAttempts, Placement, PlacementRequest, PromptSize
from router.placement.unplaceable import unplaceable_error
from router.protocol.sse import prompt_counts, take_usage
from router.protocol.validation import Sequence

_RESIDENCY_LAG_S = 1.0  # a push may be in the catalog before its residency reaches this router

log = logging.getLogger(__name__)


class PlacementSearch:
    """Belongs to one sequence. Remembers what has failed and decides whether there is another attempt."""

    def __init__(self, backends: Backends, request: Request, size: PromptSize) -> None:
        """`size`: of the sequence's prompt."""
        self._backends = backends
        self._revision = request.revision
        self._request_id = request.request_id
        needs_decode, namespace = request.validated.generates, request.namespace
        revision, scaled_id = request.revision, request.scaled_id
        wanted = PlacementRequest.of(revision, scaled_id, needs_decode=needs_decode, size=size, namespace=namespace)
        self.request = backends.placer.observe(wanted)
        self._failed = FailedAttempts()
        self._in_failures: frozenset[str] = frozenset()  # workers of the placements that have failed
        self._num_failed_attempts = 0
        config = backends.config
        self._retry_deadline = asyncio.get_running_loop().time() + config.first_event_timeout_s

    async def first(self, on_wait: Callable[[], None] | None = None) -> Placement:
        """A placement that can serve the sequence now. Raises RouterError.

        `on_wait` is called before waiting, if there is none yet. Meanwhile the sequence takes no worker's capacity.
        """
        if (found := self._best_placement(self._backends.fleet.state)) is not None:
            return found
        if on_wait is not None:
            on_wait()

        def is_gone() -> bool:
            return isinstance(self._unplaceable_error(), AdapterRevisionGone)

        # A push may be in the catalog before this router knows that its workers have the revision.
        placement = await self._wait_for_placement(is_gone, _RESIDENCY_LAG_S)
        if placement is None:
            raise self._unplaceable_error()
        return placement

    async def after(self, error: AdapterRefused | AttemptError, placement: Placement) -> Placement:
        """The placement for the next attempt, after one at `placement` failed. Raises `error` if there is none."""
        if isinstance(error, WorkerGaveBack):
            if (found := await self._wait_for_placement(lambda: True, self._left_s())) is None:
                raise error
            return found
        self._num_failed_attempts += 1
        if isinstance(error, AdapterRefused):
            if not self._may_be_elsewhere(error):
                raise error
            self._failed = self._failed.with_placement(placement).with_worker(placement.prefill.name)
            return await self.first()

        self._note(error, placement)
        has_attempts = self._num_failed_attempts < self._backends.config.max_attempts
        found = await self._retry_placement() if error.retryable and has_attempts else None
        reason = "" if isinstance(error, EngineRefusal) else str(error)  # a refusal may quote the prompt
        fields = {"request_id": self._request_id, "reason": reason, "code": error.code, "retry": found is not None}
        log.info("attempt failed", extra={"fields": fields})
        if found is None:
            raise error
        self._backends.metrics.retries.labels(error.code).inc()
        return found

    def _may_be_elsewhere(self, error: AdapterRefused) -> bool:
        """True if a worker has lost a memory-only revision: another worker may still have it."""
        return self._revision is not None and not self._revision.stored and error.code == RevisionNotStored.code

    def _note(self, error: AttemptError, placement: Placement) -> None:
        if isinstance(error, AdapterNotResident):  # the same worker only has to load it again
            return
        blamed = set(error.workers if isinstance(error, WorkerStalled) else (error.worker,))
        # A pair's transfer may be reported by the one engine and be the other's fault: nobody fails twice unblamed.
        workers = {worker.name for worker in placement.workers}
        for name in blamed | (workers & self._in_failures):
            self._failed = self._failed.with_worker(name)
        self._in_failures |= workers
        if not isinstance(error, WorkerLost) or error.was_reached:
            self._failed = self._failed.with_placement(placement)

    async def _retry_placement(self) -> Placement | None:
        """A placement for a retry. May wait for a worker that has just lost contact, until the first event is due."""

        def would_have_one() -> bool:
            return self._has_placement(self._backends.fleet.state.with_late_workers(except_for=self._failed.workers))

        return await self._wait_for_placement(would_have_one, self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self._retry_deadline - asyncio.get_running_loop().time())

    async def _wait_for_placement(self, is_expected: Callable[[], bool], timeout_s: float) -> Placement | None:
        """The best placement. If there is none, wait for one while `is_expected` holds, at most `timeout_s`."""
        fleet = self._backends.fleet
        placement = self._best_placement(fleet.state)
        if placement is None and is_expected():
            await fleet.wait_until(lambda: self._has_placement(fleet.state) or not is_expected(), timeout_s)
            placement = self._best_placement(fleet.state)
        return placement

    def _best_placement(self, fleet: FleetState) -> Placement | None:
        return self._backends.placer.place(self.request, fleet, self._failed)

    def _has_placement(self, fleet: FleetState) -> bool:
        """Whether there is any, in a small part of the time: all who wait look at each change of the fleet."""
        return any(each.key not in self._failed.placements for each in placements(self.request, fleet))

    def _unplaceable_error(self) -> RouterError:
        return unplaceable_error(self._revision, self._backends.fleet.state)


class SequenceRun:
    """One sequence; its main loop is in `router/api/request_flow.py`.

    Use as `async with`: however the block ends, the engine calls of the sequence end too.
    """

    def __init__(self, backends: Backends, request: Request, sequence: Sequence) -> None:
        self.revision_id = request.scaled_id  # None: it needs no adapter
        self._backends = backends
        self._request = request
        self._validated = request.validated
        self._sequence = sequence
        self._has_prompt = sequence.index % request.validated.num_per_prompt == 0  # a prompt counts once
        self._state = SequenceState()
        self._search: PlacementSearch | None = None
        self._attempt: Attempt | None = None
        self._span: Span = NO_SPAN  # of the attempt
        self._reservation: Reservation | None = None  # at the workers of the attempt
        self._not_in_engine: set[str] = set()  # workers whose engine has reported that it lacks the adapter
        self._phase_began_at = time.monotonic()
        request.sequences.append(self._state)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enter(Phase.DONE)
        if isinstance(error, RouterError):
            self._span.fail(error.code)
        await self._end_attempt()

    # ---- the steps ----------------------------------------------------------------------------------------------

    async def place(self) -> Placement:
        """The first placement. Raises RouterError."""
        size = self._backends.prompts.measure(self._sequence.fields, generates=self._validated.generates)
        self._search = PlacementSearch(self._backends, self._request, size)
        with self._placement_span() as span:
            placement = await self._search.first(on_wait=self._request.on_placed)
            span.set(_described(placement))
        return placement

    async def place_after(self, error: AdapterRefused | AttemptError, placement: Placement) -> Placement:
        """The placement for the next attempt, after one at `placement` failed. Raises `error` if there is none."""
        assert self._search is not None
        self._span.fail(error.code)
        await self._end_attempt()
        self._enter(Phase.ADMITTED)
        self._note_for_breakers(error, placement)
        if isinstance(error, AdapterNotResident):
            self._not_in_engine.add(error.worker)
        with self._placement_span() as span:
            placement = await self._search.after(error, placement)
            span.set(_described(placement))
        return placement

    def reserve(self, placement: Placement) -> None:
        """Count the sequence at the workers of its next attempt."""
        assert self._search is not None
        request = self._search.request
        self._enter(Phase.PLACED)
        self._state.placement = placement
        self._state.num_attempts += 1
        self._state.num_prompt_tokens, self._state.num_cached_tokens = None, 0  # what is given is of the last attempt
        if self._request.span is not NO_SPAN:
            attributes = {"prelude.sequence": self._sequence.index, "prelude.attempt": self._state.num_attempts}
            self._span = self._request.span.child("attempt", attributes)
        placer = self._backends.placer
        for worker in placement.workers:
            self._backends.fleet.breaker(worker.name).placed()
        if self._request.shows_placement:
            self._request.placements.append(str(placement))
        self._reservation = placer.take(request, placement)
        if self._request.on_placed is not None:
            self._request.on_placed()

    async def ensure_adapter(self, revision_id: str) -> None:
        """Make the revision resident before any KV room exists: a KV room that waits for a load blocks both engines."""
        reservation = self._reservation
        assert reservation is not None
        self._enter(Phase.ENSURING_ADAPTER)
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        timeout_s = self._backends.config.adapter_timeout_s
        outcomes = self._backends.metrics.ensured_adapters
        worker = reservation.placement.prefill
        name = worker.name
        try:
            with self._span.child("ensure adapter", {"prelude.worker": name}, "client") as span:
                ensured = self._backends.fleet.link_of(worker).ensure_adapter(
                    revision_id,
                    timeout_s,
                    not_in_engine=name in self._not_in_engine,
                    tenant=self._request.principal.tenant,
                    span=span,
                )
                load_s = await self._backends.fleet.unless_lost(worker, ensured)
                span.set({"prelude.load_s": load_s})
        except RouterError as error:
            outcomes.labels(error.code).inc()
            raise
        self._backends.placer.loaded(reservation, load_s)
        self._not_in_engine.discard(name)
        outcomes.labels("loaded" if load_s else "resident").inc()
        self._state.ensure_adapter_s = loop.time() - began_at
        self._backends.metrics.ensure_adapter.observe(self._state.ensure_adapter_s)

    async def call_engines(self) -> bytes:
        """The first events, or the whole answer. Raises AttemptError or DeadlineExceeded."""
        reservation = self._reservation
        assert reservation is not None
        config = self._backends.config
        rid = self._request.next_rid(self._validated.endpoint.id_prefix)
        self._enter(Phase.WAITING_FIRST_EVENT)
        self._attempt = self._start(reservation, rid)
        first = await self._attempt.begin(
            first_event_timeout_s=config.first_event_timeout_s, answer_timeout_s=config.answer_timeout_s
        )
        if not self._validated.is_streaming and reservation.placement.is_single:  # others are observed when they say so
            self._observe_prompt(reservation, first)
        if self._validated.prefill_output is not None:
            first = self._validated.prefill_output.parse(first, reservation.placement.prefill.name)
        self._enter(Phase.RELAYING)
        return first

    async def relay(self, first: bytes, write: Callable[[bytes], None], client: ClientAnswer) -> bytes:
        """Pass `first` and all further events to `write`, at the client's pace; returns the last ones, with [DONE].

        Raises RouterError.
        """
        assert self._attempt is not None
        gap_s = self._backends.config.event_gap_timeout_s
        return await self._attempt.relay(first, write, client, event_gap_timeout_s=gap_s, take_usage=self._take_usage)

    async def completed(self, answer: bytes) -> bytes:
        """As the function `completed`. Raises RouterError."""
        assert self._attempt is not None
        return await completed(answer, self._backends, self._request, self._sequence, self._attempt)

    def _take_usage(self, events: bytes) -> bytes:
        """Record the engine's token counts. Returns the client's events, without usage if it did not ask for it."""
        state = self._state
        events, usage = take_usage(events, keeps=self._validated.includes_usage)
        if usage is not None:
            state.num_prompt_tokens = usage.prompt_tokens if self._has_prompt else 0
            state.num_completion_tokens = usage.completion_tokens
            # Of a pair, it is the decode engine's.
            if usage.prompt_tokens and self._reservation is not None and not isinstance(self._attempt, PairAttempt):
                cached = (usage.prompt_tokens_details or {}).get("cached_tokens")
                self._learn(self._reservation, usage.prompt_tokens, cached or 0)
        return events

    # ---- inside the steps -------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        """Begin a phase, and record the duration of the previous one."""
        now, is_adapted = time.monotonic(), self._request.revision is not None
        timed = self._backends.metrics.phase_seconds.get((self._state.phase, is_adapted))
        if timed is not None:
            timed.observe(now - self._phase_began_at)
        self._state.phase, self._phase_began_at = phase, now

    def _placement_span(self) -> Span:
        if self._request.span is NO_SPAN:  # as for most requests: nobody reads its attributes
            return NO_SPAN
        attributes = {"prelude.sequence": self._sequence.index, "prelude.attempt": self._state.num_attempts + 1}
        return self._request.span.child("placement", attributes)

    def _note_for_breakers(self, error: AdapterRefused | AttemptError, placement: Placement) -> None:
        """Tell breakers of failures that this router has seen. Engines that end are reported by their agents."""
        fleet = self._backends.fleet
        if isinstance(error, WorkerStalled):
            for name in error.workers:
                fleet.breaker(name).failed()
        elif isinstance(error, WorkerLost):
            if error.has_broken_connection:
                fleet.breaker(error.worker).failed()
        elif isinstance(error, EngineFailure) and error.has_failed_transfer:
            for worker in placement.workers:
                fleet.breaker(worker.name).transfer_failed()
        elif isinstance(error, (EngineFailure, EngineRefusal, EngineAborted)):
            fleet.breaker(error.worker).succeeded()  # it has answered

    def _start(self, reservation: Reservation, rid: str) -> Attempt:
        """Send the engine calls: one to the worker that reads the prompt and, in a pair, one to its decode worker."""
        fleet, validated, timeout_s = self._backends.fleet, self._validated, self._backends.config.progress_timeout_s
        is_single, reader = reservation.placement.is_single, reservation.placement.prefill
        handoff = KvHandoff.of(reservation.placement, rid) if reader.role == "prefill" else None
        body = reader_body(
            self._sequence,
            self._backends.model,
            rid,
            namespace=self._request.namespace,
            revision_id=self.revision_id,
            handoff=handoff,
            generates=validated.generates,
            wants_prompt_logprobs=validated.wants_prompt_logprobs,
        )
        call = self._call(reader, body, rid, reservation.in_flight[0])
        if is_single or handoff is None:
            if validated.generates and not validated.is_streaming:  # nothing shows when its prompt was read
                in_flight = reservation.in_flight[0]
                in_flight.is_seen = False
                asyncio.get_running_loop().call_later(
                    in_flight.expected_read_s, partial(in_flight.read_ended, was_read=False)
                )
            return Attempt(fleet, call, is_streaming=validated.is_streaming, progress_timeout_s=timeout_s)
        for_decode = decode_body(
            self._sequence,
            self._backends.model,
            handoff,
            wants_prompt_logprobs=validated.wants_prompt_logprobs,
        )
        return PairAttempt(
            fleet,
            call,
            self._call(reservation.placement.decode, for_decode, rid, reservation.in_flight[1]),
            is_streaming=validated.is_streaming,
            progress_timeout_s=timeout_s,
            on_prefill_answer=partial(self._observe_prompt, reservation),
        )

    def _observe_prompt(self, reservation: Reservation, answer: bytes) -> None:
        """Learn from an answer of the engine that has read the prompt."""
        if (counts := prompt_counts(answer)) is not None:
            reservation.in_flight[0].learn_read(*counts)
            self._learn(reservation, *counts)

    def _learn(self, reservation: Reservation, prompt_tokens: int, cached_tokens: int) -> None:
        state, has_prompt = self._state, self._has_prompt
        state.num_prompt_tokens, state.num_cached_tokens = (prompt_tokens, cached_tokens) if has_prompt else (0, 0)
        self._backends.prompts.observe(reservation.request.size, prompt_tokens)
        if reservation.request.size.blocks:
            self._backends.placer.found_cached(reservation, cached_tokens)

    def _call(self, worker: WorkerView, body: Body, rid: str, in_flight: InFlightLoad) -> EngineCall:
        path = self._validated.endpoint.engine_path
        span = self._span
        if span is not NO_SPAN:
            span = span.child(worker.role, {"prelude.worker": worker.name, "prelude.rid": rid}, "client")
        return EngineCall(self._backends.engines, worker, path, body, rid, in_flight, span)

    async def _end_attempt(self) -> None:
        try:
            if self._attempt is not None:
                attempt, self._attempt = self._attempt, None
                await attempt.end()
        finally:  # also if the client disconnects meanwhile
            if self._reservation is not None:
                self._reservation.release()
            self._span.end()


def _described(placement: Placement) -> dict[str, str]:
    """A placement's attributes."""
    decode = {} if placement.is_single else {"prelude.decode": placement.decode.name}
    return {"prelude.prefill": placement.prefill.name, **decode}
