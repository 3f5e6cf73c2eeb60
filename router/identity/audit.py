"""The router's part of the audit log: changes and denials. Never prompts, bodies, headers or keys."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from adapters.catalog.records import AdapterRevision, AuditEvent
from adapters.errors import AdapterError
from adapters.identity import LATEST
from process.lifetime import meanwhile
from router.errors import CredentialInQuery, Forbidden, RouterError, Unauthenticated
from router.identity.access import AccessDenied, Principal
from router.protocol.request_body import ClientGone

_MAX_WAITING = 10_000  # events, while they cannot be written
_BATCH = 1000
_FLUSH_S = 0.2
_RETRY_S = 1.0
_CHANGE_TIMEOUT_S = 5.0  # that the answer to a change waits for its event to be written
# Denials and refused changes of one tenant, or of all strangers; further ones are counted. Nobody deletes rows, and
# strangers can make up any number, a tenant changes of what is not there.
_MAX_REFUSED_PER_MIN = 100
_OUTCOMES = {ClientGone: "client_left", asyncio.CancelledError: "router_stopping"}
_CONFIGURATION = "cluster.yaml"  # who imports at the start; also in the history of aliases
_NOTE_KEY = "prelude.change"  # in the ASGI scope

log = logging.getLogger(__name__)

Append = Callable[[Sequence[AuditEvent]], Awaitable[None]]


@dataclass(slots=True)
class ChangeNote:
    """The details of a change, filled in by its handler."""

    object: str | None = None
    old: str | None = None  # revision
    new: str | None = None


def begin_note(scope: MutableMapping[str, Any]) -> None:
    """Mark a request as a change. At its end, the guard writes the note with the outcome to the log."""
    scope[_NOTE_KEY] = ChangeNote()


def note_of(scope: MutableMapping[str, Any]) -> ChangeNote:
    """The note of a request's change. For a request that changes nothing, a note that is never written."""
    return scope.get(_NOTE_KEY) or ChangeNote()


class AuditLog:
    """Queues events for a file or a database, in order, and keeps them while it is unreachable."""

    def __init__(self, append: Append, on_lost: Callable[[int], None] = lambda _: None) -> None:
        """`on_lost` is called with the number of events that had to be dropped."""
        self._append = append
        self._on_lost = on_lost
        self._waiting: deque[AuditEvent] = deque()
        self._num_written = self._num_taken = 0
        self._suspect_until = 0  # events up to this number are written one by one: one of them cannot be written
        self._written = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._minute, self._refused_in_minute = 0, Counter[str | None]()  # by tenant
        self._num_suppressed = 0

    def running(self) -> AbstractAsyncContextManager[None]:
        """Write events inside the block. At its end, try once more to write what is still queued."""
        return meanwhile(self._run(), then=self._write_rest)

    async def _write_rest(self) -> None:
        while self._waiting and await self._write_batch():
            pass

    def denied(self, scope: MutableMapping[str, Any], principal: Principal | None, error: Exception) -> None:
        """Record the error if it is a denial. Denied changes are recorded by their guard."""
        denial = denial_in(error)
        if denial is None or _NOTE_KEY in scope or self._is_one_too_many(principal):
            return
        adapter = denial.adapter if isinstance(denial, AccessDenied) else None
        self._take(_event(scope, principal, f"{scope['method']} {scope['path'][:200]}", denial, ChangeNote(adapter)))

    async def changed(
        self, scope: MutableMapping[str, Any], principal: Principal, action: str, error: BaseException | None
    ) -> None:
        """Record a change with its outcome, and wait for a bounded time until it is written.

        Refused changes of one tenant are limited; further ones are only counted.
        """
        is_refused = isinstance(error, RouterError | AdapterError) and error.http_status < 500
        if is_refused and self._is_one_too_many(principal):
            return
        number = self._take(_event(scope, principal, action, error, note_of(scope)))
        self._wanted.set()
        try:
            async with asyncio.timeout(_CHANGE_TIMEOUT_S), self._written:
                await self._written.wait_for(lambda: self._num_written >= number)
        except TimeoutError:
            log.error("audit event of a change not written yet", extra={"fields": {"request_id": scope["request_id"]}})

    def configured(
        self, adapter: str, old: AdapterRevision | None, new: AdapterRevision | None, error: Exception | None
    ) -> None:
        """Record the import of an adapter of cluster.yaml: it is a change that nobody asked for over HTTP."""
        name = f"{adapter}@{LATEST}" if error is None else adapter
        at, revisions = datetime.now(UTC), (described(old), described(new))
        self._take(AuditEvent(at, _CONFIGURATION, None, "adapter.import", name, *revisions, _outcome(error), None))

    def _is_one_too_many(self, principal: Principal | None) -> bool:
        """Whether the tenant, or strangers, have had this minute's rows; then the event is counted."""
        minute = int(asyncio.get_running_loop().time() // 60)
        if minute != self._minute:
            self._minute, self._refused_in_minute = minute, Counter()
        tenant = principal.tenant if principal else None
        self._refused_in_minute[tenant] += 1
        is_over = self._refused_in_minute[tenant] > _MAX_REFUSED_PER_MIN
        self._num_suppressed += is_over
        return is_over

    def _take(self, event: AuditEvent) -> int:
        if self._num_suppressed:
            text = f"{self._num_suppressed} more"
            self._waiting.append(AuditEvent(event.at, "unknown", None, "denials", text, None, None, "denied", None))
            self._num_suppressed = 0
            self._num_taken += 1
        self._waiting.append(event)
        self._num_taken += 1
        if len(self._waiting) > _MAX_WAITING:
            self._drop_oldest()
        return self._num_taken

    def _drop_oldest(self) -> None:
        self._waiting.popleft()
        self._num_written += 1
        self._on_lost(1)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            while self._waiting:
                if not await self._write_batch():
                    await asyncio.sleep(_RETRY_S)

    async def _write_batch(self) -> bool:
        """Write the oldest events. False if that failed; they stay queued.

        A batch that cannot be written for an unforeseen reason is tried event by event, and what fails alone is lost:
        one bad event must not keep the others.
        """
        number = self._num_written
        most = 1 if number < self._suspect_until else _BATCH
        batch = [self._waiting[index] for index in range(min(most, len(self._waiting)))]
        try:
            await self._append(batch)
        except (AdapterError, OSError) as error:
            log.error("audit log not written", extra={"fields": {"events": len(self._waiting), "reason": str(error)}})
            return False
        except Exception as error:  # noqa: BLE001  # whatever it is, later events must not wait for these
            reason = type(error).__name__  # its text has the whole batch
            log.error("audit events cannot be written", extra={"fields": {"events": len(batch), "reason": reason}})
            self._suspect_until = number + len(batch)
            if len(batch) > 1:
                return True
            if number == self._num_written:  # not dropped meanwhile
                self._drop_oldest()
            return False  # a pause: where all fail, few are lost before somebody looks
        for _ in range(number + len(batch) - self._num_written):  # less what was dropped meanwhile
            self._waiting.popleft()
            self._num_written += 1
        async with self._written:
            self._written.notify_all()
        return True


def denial_in(error: BaseException | None) -> RouterError | AccessDenied | None:
    """The denial in an error or its causes; None if there is none."""
    if isinstance(error, (Unauthenticated, Forbidden, CredentialInQuery, AccessDenied)):
        return error
    return denial_in(error.__cause__) if error is not None and error.__cause__ is not None else None


def _event(
    scope: MutableMapping[str, Any],
    principal: Principal | None,
    action: str,
    error: BaseException | None,
    note: ChangeNote,
) -> AuditEvent:
    client = scope.get("client")
    stranger = f"unknown at {client[0]}" if client else "unknown"
    return AuditEvent(
        at=datetime.now(UTC),
        who=principal.name if principal else stranger,
        tenant=principal.tenant if principal else None,
        action=action,
        object=note.object,
        old=note.old,
        new=note.new,
        outcome=_outcome(error),
        request_id=scope.get("request_id"),
    )


def described(revision: AdapterRevision | None) -> str | None:
    """A revision in an event, or how an alias was split."""
    if revision is not None and revision.split is not None:
        return str(revision.split.target)
    return None if revision is None else f"r{revision.number} {revision.revision_id}"


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "denied" if denial_in(error) else str(getattr(error, "code", _OUTCOMES.get(type(error), "failed")))
