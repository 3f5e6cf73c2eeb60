"""One object per request in flight: what each step of its way has found, and the phase of each of its sequences."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

from adapters.catalog.records import AdapterRevision
from process.tracing.span import NO_SPAN, Span
from router.identity.access import Principal
from router.placement.request import Placement
from router.protocol.validation import Endpoint, ValidatedRequest

CLIENT_LEFT = 499  # nginx's status for a closed connection; for metrics and logs only
_CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Phase(StrEnum):
    """The life of a sequence, in order. A retry goes back to `placed`, or to `admitted` while it waits for a worker."""

    ADMITTED = "admitted"
    PLACED = "placed"
    ENSURING_ADAPTER = "ensuring_adapter"
    WAITING_FIRST_EVENT = "waiting_first_event"
    RELAYING = "relaying"
    DONE = "done"


class AnswerTranslator(Protocol):
    """Makes the client's answer of the engine's."""

    def on_events(self, events: bytes, /) -> bytes:
        """Translate whole events."""

    def on_answer(self, answer: bytes, /) -> bytes:
        """Translate a whole answer."""


@dataclass(slots=True)
class SequenceState:
    """The progress of one sequence. Written by its SequenceRun only."""

    phase: Phase = Phase.ADMITTED
    placement: Placement | None = None  # of the last attempt
    num_attempts: int = 0
    ensure_adapter_s: float = 0.0
    num_prompt_tokens: int | None = None  # as an engine has counted; 0 if another sequence has them
    num_cached_tokens: int = 0  # of these
    num_completion_tokens: int | None = None  # of a stream

    def described(self) -> dict[str, Any]:
        """For the debug page. A unified worker is named in both places, a prefill worker never as decode."""
        decode = self.placement.decode if self.placement else None
        return {
            "phase": self.phase,
            "prefill": self.placement and self.placement.prefill.name,
            "decode": decode.name if decode and decode.role != "prefill" else None,
            "attempts": self.num_attempts,
        }


@dataclass(slots=True, eq=False)
class Request:
    """One request, from its first byte to its log line. `router/api/request_flow.py` has its steps."""

    # received
    request_id: str
    endpoint: Endpoint
    principal: Principal  # who makes it
    headers: dict[bytes, bytes] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)
    span: Span = NO_SPAN  # ends with the request

    # validated, resolved, admitted
    validated: ValidatedRequest = field(init=False)
    is_streaming: bool = False
    revision: AdapterRevision | None = None  # None: the base model
    adapter: str | None = None  # its full name
    revision_id: str | None = None
    adapter_scale: float | None = None  # as the client wrote it
    scaled_id: str | None = None  # what workers call the revision at this scale, also in keys of prefix caches
    split_alias: str | None = None  # by which it got the revision
    namespace: str = ""  # of the prefix cache
    translator: AnswerTranslator = field(init=False)
    most_output_tokens: int | None = None  # that the client, or the router, allows; only if it is counted
    on_placed: Callable[[], None] | None = None  # called for each sequence, and each attempt, that counts at workers

    # placed and relayed
    sequences: list[SequenceState] = field(default_factory=list)
    num_rids: int = 0  # given to attempts of all sequences
    shows_placement: bool = False  # in the answer's headers
    placements: list[str] = field(default_factory=list)  # of all attempts, if they are shown

    # answered
    answer_headers: dict[str, str] = field(default_factory=dict)  # sent with errors, too
    status: int | None = None  # of the answer; None until it is sent
    stream_error: str | None = None  # code of the error that ended a stream
    first_byte_s: float | None = None  # since started_at
    num_events: int = 0
    num_prompt_tokens: int | None = None  # that engines have counted
    num_completion_tokens: int | None = None

    @property
    def client_request_id(self) -> str | None:
        """The client's own id, for the log only, if its characters are safe."""
        given = self.headers.get(b"x-request-id")
        return given.decode() if given is not None and _CLIENT_REQUEST_ID.fullmatch(given) else None

    def next_rid(self, prefix: str) -> str:
        """An id for the engine calls of one attempt. Fixed width: engines abort every id that has the given prefix."""
        self.num_rids += 1
        return f"{prefix}{self.request_id}-{self.num_rids:06d}"

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far: the engine's count or, if more, a stream's events except the last one."""
        return max(self.num_completion_tokens or 0, self.num_events - 1, 0)

    def sum_usages(self) -> None:
        """Sum up the engines' token counts of all sequences, if every sequence has one."""
        output = prompt = 0
        if not self.sequences:
            return
        for sequence in self.sequences:
            if sequence.num_completion_tokens is None or sequence.num_prompt_tokens is None:
                return
            output += sequence.num_completion_tokens
            prompt += sequence.num_prompt_tokens
        self.num_prompt_tokens, self.num_completion_tokens = prompt, output

    def described(self) -> dict[str, Any]:
        """For the debug page."""
        return {
            "request_id": self.request_id,
            "endpoint": self.endpoint.label,
            "adapter": self.adapter,
            "revision": self.revision_id,
            "age_s": round(self.age_s, 3),
            "streaming": self.is_streaming,
            "sequences": [sequence.described() for sequence in self.sequences],
        }


class Requests:
    """All requests in flight."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self._num_tokens_before = 0  # of the requests that have ended
        self._has_emptied = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def record(self, request: Request) -> Iterator[None]:
        """List the request as in flight inside the block."""
        self._by_id[request.request_id] = request
        try:
            yield
        finally:
            del self._by_id[request.request_id]
            self._num_tokens_before += request.num_output_tokens
            if not self._by_id:
                self._has_emptied.set()

    async def wait_until_empty(self, timeout_s: float) -> None:
        """Wait until no request is in flight, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._by_id:
                    self._has_emptied.clear()
                    await self._has_emptied.wait()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests since the start, including those in flight."""
        return self._num_tokens_before + sum(request.num_output_tokens for request in self._by_id.values())

    def described(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The records for the debug page, oldest first; all of them, or at most `limit`."""
        return [request.described() for request in islice(self._by_id.values(), limit)]


def new_request_id() -> str:
    """32 random hex digits. Never the client's id: if two clients sent the same one, one could abort the other."""
    return os.urandom(16).hex()
