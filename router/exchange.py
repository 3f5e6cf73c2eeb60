"""One sequence's way: place, ensure the adapter, send both legs, await the first event, relay; or try another pair."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from cluster.config import RouterConfig
from router.admission import Admitted, Sequence
from router.attempt import Attempt
from router.bodies import Meeting, decode_body, prefill_body
from router.engines import Engines
from router.errors import AdapterNotResident, ExchangeError, NoPlaceablePair
from router.fleet import Fleet
from router.in_flight import Hold, InFlightState
from router.metrics import Metrics
from router.placement import Pair, PlacementRequest, rank_pairs
from router.requests import Phase, RequestState, SequenceState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backends:
    """What every exchange of this router uses."""

    fleet: Fleet
    engines: Engines
    metrics: Metrics
    config: RouterConfig
    in_flight: InFlightState
    model: str  # the name that engines know the base model by


@dataclass(frozen=True, slots=True)
class Order:
    """What all sequences of a request have in common."""

    admitted: Admitted
    tenant: str
    revision_id: str | None


class Exchange:
    """One sequence. Use as `async with`: however it is left, nothing of it stays at an engine."""

    def __init__(self, backends: Backends, order: Order, sequence: Sequence, request: RequestState) -> None:
        self._backends = backends
        self._order = order
        self._sequence = sequence
        self._request = request
        self._state = SequenceState()
        self._attempt: Attempt | None = None
        self._holds: list[Hold] = []  # this sequence's places on its workers
        self._tried: set[tuple[str, str, str, str]] = set()  # pairs, by names and incarnations
        self._suspects: set[str] = set()  # workers that failed
        request.sequences.append(self._state)

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.phase = Phase.DONE
        await self._end_attempt()

    async def begin(self) -> bytes:
        """Decode's first events, or its whole answer, from the first pair that gives one. Raises RouterError."""
        while True:
            pair = self._place()
            try:
                await self._ensure_adapter(pair)
                return await self._send_both_legs(pair)
            except ExchangeError as error:
                await self._end_attempt()
                self._note(error, pair)
                if not self._can_retry(error):
                    raise

    async def relay(self, first: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Hand `first` and all events after it to `write`. Raises RouterError."""
        assert self._attempt is not None
        await self._attempt.relay(first, write, event_gap_timeout_s=self._backends.config.event_gap_timeout_s)

    async def prefill_answer(self) -> bytes:
        """Prefill's own answer. Raises RouterError."""
        assert self._attempt is not None
        return await self._attempt.prefill_answer(self._backends.config.first_event_timeout_s)

    # ---- the steps ----------------------------------------------------------------------------------------------

    def _place(self) -> Pair:
        pairs = self._untried_pairs()
        if not pairs:
            raise NoPlaceablePair("no pair of prefill and decode workers can take requests now; try again soon")
        pair = pairs[0]
        self._state.phase = Phase.PLACED
        self._state.prefill, self._state.decode = pair.prefill.name, pair.decode.name
        self._state.num_attempts += 1
        self._holds = [self._backends.in_flight.hold(worker.name) for worker in (pair.prefill, pair.decode)]
        return pair

    async def _ensure_adapter(self, pair: Pair) -> None:
        """Make the revision resident before any KV room exists: a room that waits for a load blocks its workers."""
        if self._order.revision_id is None:
            return
        self._state.phase = Phase.ENSURING_ADAPTER
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        timeout_s = self._backends.config.adapter_timeout_s
        await self._backends.fleet.ensure_adapter(pair.prefill.name, self._order.revision_id, timeout_s)
        self._state.ensure_adapter_s = loop.time() - began_at
        self._backends.metrics.ensure_adapter.observe(self._state.ensure_adapter_s)

    async def _send_both_legs(self, pair: Pair) -> bytes:
        admitted, engines, config = self._order.admitted, self._backends.engines, self._backends.config
        path = admitted.endpoint.value
        meeting = Meeting.at(pair, self._request.next_rid(admitted.endpoint.id_prefix))
        for_prefill = prefill_body(
            self._sequence,
            self._backends.model,
            meeting,
            tenant=self._order.tenant,
            revision_id=self._order.revision_id,
            wants_prompt_logprobs=admitted.wants_prompt_logprobs,
        )
        for_decode = decode_body(self._sequence, self._backends.model, meeting)
        self._state.phase = Phase.WAITING_FIRST_EVENT
        self._attempt = Attempt(
            self._backends.fleet,
            pair,
            engines.leg(pair.prefill, path, for_prefill, meeting.rid, self._holds[0]),
            engines.leg(pair.decode, path, for_decode, meeting.rid, self._holds[1]),
            is_streaming=admitted.is_streaming,
        )
        first = await self._attempt.begin(
            first_event_timeout_s=config.first_event_timeout_s, answer_timeout_s=config.answer_timeout_s
        )
        self._state.phase = Phase.RELAYING
        return first

    async def _end_attempt(self) -> None:
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            await attempt.end()
        for hold in self._holds:
            hold.release()

    # ---- trying again -------------------------------------------------------------------------------------------

    def _untried_pairs(self) -> list[Pair]:
        """Ranked pairs that did not fail this sequence; those with workers that did come last."""
        ranked = rank_pairs(PlacementRequest(self._order.revision_id), self._backends.fleet.state)
        untried = [pair for pair in ranked if _key(pair) not in self._tried]
        return sorted(untried, key=lambda pair: len(self._suspects & {pair.prefill.name, pair.decode.name}))

    def _note(self, error: ExchangeError, pair: Pair) -> None:
        if not isinstance(error, AdapterNotResident):  # loading it again, on the same pair, is the cure for that
            self._tried.add(_key(pair))
            self._suspects.add(error.worker)

    def _can_retry(self, error: ExchangeError) -> bool:
        has_tries = self._state.num_attempts < self._backends.config.max_attempts
        can_retry = error.retryable and has_tries and bool(self._untried_pairs())
        if can_retry:
            self._backends.metrics.retries.labels(error.code).inc()
        fields = {"request_id": self._request.request_id, "reason": str(error), "code": error.code, "retry": can_retry}
        log.info("exchange failed", extra={"fields": fields})
        return can_retry


def _key(pair: Pair) -> tuple[str, str, str, str]:
    return pair.prefill.name, pair.prefill.incarnation, pair.decode.name, pair.decode.incarnation
