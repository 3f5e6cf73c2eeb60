"""One sequence's way: place, ensure the adapter, send its legs, await the first event, relay; or try elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from adapters.catalog.records import AdapterRevision
from adapters.identity import DEFAULT_TENANT
from adapters.store import RevisionNotStored
from router.errors import (
    AdapterNotResident,
    AdapterRefused,
    AdapterRevisionGone,
    AttemptError,
    RouterError,
    WorkerLost,
)
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.in_flight import Hold
from router.generation.attempt import Attempt
from router.generation.backends import Backends
from router.generation.engine_bodies import KvHandoff, decode_body, prefill_body, unified_body
from router.generation.engine_calls import EngineCall
from router.generation.pair_attempt import PairAttempt
from router.generation.request_state import Phase, RequestState, SequenceState
from router.placement.placement import FailedAttempts, Placement, PlacementRequest, place
from router.placement.unplaceable import unplaceable_error
from router.protocol.prompt_logprobs import with_prompt_logprobs, without_alternatives
from router.protocol.validation import Sequence, ValidatedRequest

_RESIDENCY_LAG_S = 1.0  # a push may be in the catalog before its residency reaches this router

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What all sequences of a request have in common."""

    validated: ValidatedRequest
    revision: AdapterRevision | None  # None: the base model

    @property
    def tenant(self) -> str:
        return self.revision.tenant if self.revision else DEFAULT_TENANT

    @property
    def revision_id(self) -> str | None:
        return self.revision.revision_id if self.revision else None


class SequenceRun:
    """One sequence. Use as `async with`: however it is left, nothing of it stays at an engine."""

    def __init__(
        self, backends: Backends, wanted: GenerationRequest, sequence: Sequence, request: RequestState
    ) -> None:
        self._backends = backends
        self._wanted = wanted
        self._sequence = sequence
        self._request = request
        self._state = SequenceState()
        self._attempt: Attempt | None = None
        self._holds: list[Hold] = []  # this sequence's places on its workers
        self._failed = FailedAttempts()
        self._began_at = 0.0  # by the loop's clock
        self._lacking: set[str] = set()  # workers whose engine has said that it does not have the adapter
        request.sequences.append(self._state)

    async def __aenter__(self) -> SequenceRun:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.phase = Phase.DONE
        await self._end_attempt()

    async def begin(self) -> bytes:
        """The first events, or the whole answer, from the first placement that gives one. Raises RouterError."""
        self._began_at = asyncio.get_running_loop().time()
        placement = await self._first_placement()
        while True:
            self._take(placement)
            try:
                await self._ensure_adapter(placement)
                return await self._send(placement)
            except AdapterRefused as error:
                if not self._is_only_here(error):
                    raise
                await self._end_attempt()
                # It has just lost what no store has. Another worker may still have it.
                self._failed = self._failed.with_placement(placement).with_worker(placement.prefill.name)
                placement = await self._first_placement()
            except AttemptError as error:
                await self._end_attempt()
                self._note(error, placement)
                placement = await self._retry_placement(error)

    async def relay(self, first: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Hand `first` and all events after it to `write`. Raises RouterError."""
        assert self._attempt is not None
        await self._attempt.relay(first, write, event_gap_timeout_s=self._backends.config.event_gap_timeout_s)

    async def answer(self) -> bytes:
        """The whole answer of a sequence that is not streamed, with all that was asked for. Raises RouterError."""
        answer = await self.begin()
        if not self._wanted.validated.wants_prompt_logprobs:
            return answer
        if isinstance(self._attempt, PairAttempt):
            prefill_answer = await self._attempt.prefill_answer(self._backends.config.first_event_timeout_s)
            return with_prompt_logprobs(answer, prefill_answer)
        wants_alternatives = bytes(self._sequence.fields["logprobs"]) != b"0"
        return answer if wants_alternatives else without_alternatives(answer)

    # ---- the steps ----------------------------------------------------------------------------------------------

    async def _first_placement(self) -> Placement:
        """A placement that can serve the sequence now. Raises RouterError."""

        def is_gone() -> bool:
            return isinstance(self._unplaceable_error(), AdapterRevisionGone)

        # A push may be in the catalog before this router knows that its workers have the revision.
        placement = await self._placement(is_gone, _RESIDENCY_LAG_S)
        if placement is None:
            raise self._unplaceable_error()
        return placement

    async def _placement(self, can_come: Callable[[], bool], timeout_s: float) -> Placement | None:
        """The best placement. Where there is none, wait for one until `can_come` is false or the time is over."""
        placement = self._best_placement()
        if placement is None and can_come():
            self._state.phase = Phase.ADMITTED
            await self._backends.fleet.wait_until(
                lambda: self._best_placement() is not None or not can_come(), timeout_s
            )
            placement = self._best_placement()
        return placement

    def _best_placement(self) -> Placement | None:
        return self._best_placement_in(self._backends.fleet.state)

    def _best_placement_in(self, fleet: FleetState) -> Placement | None:
        return place(PlacementRequest.of(self._wanted.revision), fleet, self._failed)

    def _unplaceable_error(self) -> RouterError:
        return unplaceable_error(self._wanted.revision, self._backends.fleet.state)

    def _take(self, placement: Placement) -> None:
        self._state.phase = Phase.PLACED
        self._state.placement = placement
        self._state.num_attempts += 1
        self._holds = [self._backends.in_flight.hold(worker.name) for worker in placement.workers]

    async def _ensure_adapter(self, placement: Placement) -> None:
        """Make the revision resident before any KV room exists: a room that waits for a load blocks its workers."""
        if self._wanted.revision_id is None:
            return
        self._state.phase = Phase.ENSURING_ADAPTER
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        timeout_s = self._backends.config.adapter_timeout_s
        outcomes = self._backends.metrics.ensured_adapters
        try:
            name = placement.prefill.name
            load_s = await self._backends.fleet.link(name).ensure_adapter(
                self._wanted.revision_id, timeout_s, not_in_engine=name in self._lacking
            )
        except RouterError as error:
            outcomes.labels(error.code).inc()
            raise
        self._lacking.discard(name)
        outcomes.labels("loaded" if load_s else "resident").inc()
        self._state.ensure_adapter_s = loop.time() - began_at
        self._backends.metrics.ensure_adapter.observe(self._state.ensure_adapter_s)

    async def _send(self, placement: Placement) -> bytes:
        config = self._backends.config
        rid = self._request.next_rid(self._wanted.validated.endpoint.id_prefix)
        self._state.phase = Phase.WAITING_FIRST_EVENT
        begin = self._begin_unified if placement.is_unified else self._begin_pair
        self._attempt = begin(placement, rid)
        first = await self._attempt.begin(
            first_event_timeout_s=config.first_event_timeout_s, answer_timeout_s=config.answer_timeout_s
        )
        self._state.phase = Phase.RELAYING
        return first

    def _begin_unified(self, placement: Placement, rid: str) -> Attempt:
        (worker,), (hold,) = placement.workers, self._holds
        body = unified_body(
            self._sequence,
            self._backends.model,
            rid,
            tenant=self._wanted.tenant,
            revision_id=self._wanted.revision_id,
            wants_prompt_logprobs=self._wanted.validated.wants_prompt_logprobs,
        )
        call = self._call(worker, body, rid, hold)
        return Attempt(self._backends.fleet, call, is_streaming=self._wanted.validated.is_streaming)

    def _begin_pair(self, pair: Placement, rid: str) -> Attempt:
        handoff = KvHandoff.at(pair, rid)
        for_prefill = prefill_body(
            self._sequence,
            self._backends.model,
            handoff,
            tenant=self._wanted.tenant,
            revision_id=self._wanted.revision_id,
            wants_prompt_logprobs=self._wanted.validated.wants_prompt_logprobs,
        )
        for_decode = decode_body(self._sequence, self._backends.model, handoff)
        prefill_hold, decode_hold = self._holds
        return PairAttempt(
            self._backends.fleet,
            self._call(pair.prefill, for_prefill, rid, prefill_hold),
            self._call(pair.decode, for_decode, rid, decode_hold),
            is_streaming=self._wanted.validated.is_streaming,
        )

    def _call(self, worker: WorkerView, body: bytes, rid: str, hold: Hold) -> EngineCall:
        return self._backends.engines.call(worker, self._wanted.validated.endpoint.value, body, rid, hold)

    async def _end_attempt(self) -> None:
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            await attempt.end()
        for hold in self._holds:
            hold.release()

    # ---- trying again -------------------------------------------------------------------------------------------

    def _is_only_here(self, error: AdapterRefused) -> bool:
        """True where a worker says that it cannot get a revision that is in no store."""
        revision = self._wanted.revision
        return revision is not None and not revision.stored and error.code == RevisionNotStored.code

    def _note(self, error: AttemptError, placement: Placement) -> None:
        if isinstance(error, AdapterNotResident):  # loading it again, on the same workers, is the cure for that
            self._lacking.add(error.worker)
            return
        self._failed = self._failed.with_worker(error.worker)
        if not isinstance(error, WorkerLost) or error.was_reached:
            self._failed = self._failed.with_placement(placement)

    async def _retry_placement(self, error: AttemptError) -> Placement:
        """The placement for the attempt after one that ended with `error`. Raises `error` if there is to be none.

        Waits for a worker that has just lost contact, as long as the first event is not overdue.
        """

        def can_come() -> bool:
            fleet = self._backends.fleet.state.with_late_workers(except_for=self._failed.workers)
            return self._best_placement_in(fleet) is not None

        config, placement = self._backends.config, None
        if error.retryable and self._state.num_attempts < config.max_attempts:
            elapsed_s = asyncio.get_running_loop().time() - self._began_at
            placement = await self._placement(can_come, max(0.0, config.first_event_timeout_s - elapsed_s))
        fields = {"request_id": self._request.request_id, "reason": str(error), "code": error.code}
        log.info("attempt failed", extra={"fields": {**fields, "retry": placement is not None}})
        if placement is None:
            raise error
        self._backends.metrics.retries.labels(error.code).inc()
        return placement
