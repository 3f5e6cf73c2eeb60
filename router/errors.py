"""The router's error tree, and the one place that turns errors into answers.

    RouterError
    ├── RequestError                 the client's mistake, or a request that this cluster cannot serve
    │   ├── InvalidBody              not a JSON object in UTF-8
    │   ├── InvalidField             a field has a wrong type or value
    │   ├── RefusedField             a field that only Prelude may give an engine
    │   ├── InvalidUpload            an adapter's files in an unsupported form
    │   ├── BodyTooLarge, BodyTooSlow
    │   ├── Unauthenticated          no key or token, or one that is not valid
    │   ├── CredentialInQuery        a key in the URL, where logs keep it
    │   ├── Forbidden                the key or token lacks the scope, or is of another tenant
    │   ├── UnknownPath, WrongMethod
    │   ├── NotOffered               a path of OpenAI or SGLang that engines here cannot serve
    │   ├── ManagementOff            adapter management is disabled
    │   ├── ForeignPage              a page of another site calls a listener that asks for no key
    │   ├── ConsoleRefused           a call through the admin listener that is not the console's own
    │   ├── UnknownWorker            no such worker, or one that holds no adapters
    │   ├── UnknownModel             neither the base model nor an adapter
    │   ├── ConflictingAdapters      `adapter` and `model` name different adapters
    │   ├── AdapterRevisionGone      a memory-only revision that no worker has any more
    │   └── NeedsUnifiedWorker       an adapter that no worker of this cluster can ever apply
    ├── Busy
    │   ├── TooManyUploads, TooManyCatalogCalls   the limit of those at a time is reached
    │   ├── TooManyBytes             the bodies of all requests in flight reach their limit
    │   ├── QuotaExceeded            the tenant, key or adapter has reached a limit of its quota
    │   ├── QueueFull                the fleet is saturated, and enough of the tenant's requests wait
    │   └── QueuedTooLong            the fleet is saturated, and the tenant's turn did not come in time
    ├── Unavailable
    │   ├── NoWorkerAvailable        no suitable worker is placeable now
    │   ├── RouterExhausted          this router is out of connections, descriptors or ports; no worker is at fault
    │   ├── IdentityUnavailable      keys cannot be checked yet
    │   └── Stopping                 this router is shutting down
    ├── PushFailed                   no worker could load the new revision
    ├── AdapterRefused               the worker will never load this adapter
    ├── AttemptError                 an attempt at one placement failed
    │   ├── WorkerLost               the connection or the engine was lost, or the engine hangs
    │   ├── WorkerStalled            nothing that the request waits for makes progress
    │   ├── EngineFailure            a 5xx, or the engine is busy
    │   ├── EngineAborted            the engine aborted the request
    │   ├── EngineRefusal            a 4xx: the request is wrong
    │   ├── AdapterUnavailable       the worker could not load the adapter now
    │   ├── AdapterNotResident       the adapter left the engine between loading and use
    │   └── BrokenAnswer             the answer is incomplete or unreadable
    └── DeadlineExceeded             a worker missed a deadline

Errors of `adapters.errors` carry the same three attributes and are answered in the same place.
`retryable`: the same request may succeed on other workers or later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from adapters.errors import AdapterError

RETRY_AFTER_S = 1  # the default of the header


class RouterError(Exception):
    """Any reason why a request is not answered with 200."""

    code = "internal_error"
    http_status = 500
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s: float | None = None  # overrides RETRY_AFTER_S
        self.headers: dict[str, str] = {}  # more of the answer's


class RequestError(RouterError):
    code = "invalid_request"
    http_status = 400


class InvalidBody(RequestError):
    code = "invalid_body"


class InvalidField(RequestError):
    code = "invalid_field"


class RefusedField(RequestError):
    code = "refused_field"


class InvalidUpload(RequestError):
    code = "invalid_upload"


class BodyTooLarge(RequestError):
    code = "body_too_large"
    http_status = 413


class BodyTooSlow(RequestError):
    code = "body_too_slow"
    http_status = 408


class Unauthenticated(RequestError):
    code = "invalid_api_key"  # OpenAI's code
    http_status = 401


class CredentialInQuery(RequestError):
    code = "credential_in_query"


class Forbidden(RequestError):
    code = "insufficient_scope"
    http_status = 403


class UnknownPath(RequestError):
    code = "unknown_path"
    http_status = 404


class NotOffered(RequestError):
    """404 and not 501, which clients try again."""

    code = "not_offered"
    http_status = 404


class WrongMethod(RequestError):
    code = "wrong_method"
    http_status = 405


class ManagementOff(RequestError):
    code = "management_off"
    http_status = 403


class ForeignPage(RequestError):
    code = "foreign_page"
    http_status = 403


class ConsoleRefused(RequestError):
    code = "console_refused"
    http_status = 403


class UnknownWorker(RequestError):
    code = "unknown_worker"


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404


class ConflictingAdapters(RequestError):
    code = "conflicting_adapters"


class NeedsUnifiedWorker(RequestError):
    code = "unified_worker_needed"
    http_status = 422


class AdapterRevisionGone(RequestError):
    code = "adapter_revision_gone"
    http_status = 410


class Busy(RouterError):
    http_status = 429
    retryable = True


class Unavailable(RouterError):
    http_status = 503
    retryable = True


class TooManyUploads(Busy):
    code = "too_many_uploads"


class TooManyCatalogCalls(Busy):
    code = "too_many_catalog_calls"


class QuotaExceeded(Busy):
    code = "rate_limit_exceeded"  # OpenAI's code


class QueueFull(Busy):
    code = "queue_full"


class QueuedTooLong(Busy):
    code = "queued_too_long"


class TooManyBytes(Busy):
    code = "too_many_bytes"


class PushFailed(RouterError):
    code = "push_failed"
    http_status = 502
    retryable = True


class NoWorkerAvailable(Unavailable):
    code = "no_worker_available"


class RouterExhausted(Unavailable):
    """What the router lacks on its own host says nothing about workers: it is neither retried nor held against them."""

    code = "router_exhausted"

    def __init__(self, message: str, *, is_passing: bool = True) -> None:
        super().__init__(message)
        self.retryable = is_passing


class AdapterRefused(RouterError):
    """An AdapterError of the worker, with its code, status and message."""

    def __init__(self, message: str, *, code: str, http_status: int) -> None:
        super().__init__(message, param="adapter")
        self.code = code
        self.http_status = http_status


class AttemptError(RouterError):
    """An attempt failed. `worker` is the one at fault."""

    code = "worker_failed"
    http_status = 502
    retryable = True

    def __init__(self, message: str, *, worker: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.worker = worker


class WorkerLost(AttemptError):
    code = "worker_lost"

    def __init__(
        self, message: str, *, worker: str, was_reached: bool = True, has_broken_connection: bool = False
    ) -> None:
        super().__init__(message, worker=worker)
        self.was_reached = was_reached  # False: no connection in time, so the engine has not seen the request
        self.has_broken_connection = has_broken_connection  # seen by this router itself, not told by the agent


class WorkerStalled(AttemptError):
    """`workers` are all that the request waited for; which one is at fault is unknown."""

    code = "worker_stalled"
    http_status = 504

    def __init__(self, message: str, *, workers: tuple[str, ...]) -> None:
        super().__init__(message, worker=workers[0])
        self.workers = workers


class EngineFailure(AttemptError):
    """The engine failed, or is overloaded (503)."""

    code = "engine_failure"

    def __init__(self, message: str, *, worker: str, is_busy: bool = False, has_failed_transfer: bool = False) -> None:
        super().__init__(message, worker=worker)
        self.has_failed_transfer = has_failed_transfer  # of KV, with the other worker of the pair
        if is_busy:
            self.code, self.http_status = "engine_busy", 503


class EngineAborted(AttemptError):
    code = "engine_aborted"
    http_status = 503


class EngineRefusal(AttemptError):
    """The engine rejected the request. Carries the engine's status and message."""

    code = "invalid_request"
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        worker: str,
        http_status: int = 400,
        param: str | None = None,
        is_too_long: bool = False,
    ) -> None:
        super().__init__(message, worker=worker, param=param)
        self.http_status = http_status
        if is_too_long:
            self.code = "context_length_exceeded"  # OpenAI's code, which clients check


class AdapterNotResident(AttemptError):
    code = "adapter_not_resident"
    http_status = 503


class AdapterUnavailable(AttemptError):
    """A transient failure of a worker to load an adapter, with the worker's own code and retry-after if it gave them.

    503 and not 429, because the workers are overloaded and not this client.
    """

    code = "adapter_unavailable"
    http_status = 503

    def __init__(
        self,
        message: str,
        *,
        worker: str,
        code: str | None = None,
        http_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, worker=worker, param="adapter")
        self.code = code or self.code
        self.http_status = http_status or self.http_status
        self.retry_after_s = retry_after_s


class BrokenAnswer(AttemptError):
    code = "broken_answer"


class DeadlineExceeded(RouterError):
    code = "deadline_exceeded"
    http_status = 504


class IdentityUnavailable(Unavailable):
    code = "identity_unavailable"


class Stopping(Unavailable):
    code = "router_stopping"


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error in OpenAI's shape."""

    status: int
    code: str
    body: bytes  # {"error": {...}}
    retryable: bool
    retry_after_s: float | None = None
    more_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        seconds = max(1, math.ceil(self.retry_after_s or RETRY_AFTER_S))
        retry = {"retry-after": str(seconds)} if self.retryable else {}
        challenge = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return {"content-type": "application/json", **retry, **challenge, **self.more_headers}

    @property
    def event(self) -> bytes:
        """The error as the last event of a stream."""
        return b"data: " + self.body + b"\n\n"


def answer_of(error: BaseException) -> ErrorAnswer:
    """The answer to the client. The text of an error outside both trees is not passed on."""
    if not isinstance(error, RouterError | AdapterError):
        error = RouterError("the router failed; its log has the reason under this request's id")
    status, code = error.http_status, error.code
    body = {
        "error": {
            "message": str(error),
            "type": _type_of(status),
            "param": getattr(error, "param", None),
            "code": code,
        }
    }
    retry_after_s = getattr(error, "retry_after_s", None)
    more_headers = error.headers if isinstance(error, RouterError) else {}
    return ErrorAnswer(status, code, msgspec.json.encode(body), error.retryable, retry_after_s, more_headers)


def _type_of(status: int) -> str:
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
