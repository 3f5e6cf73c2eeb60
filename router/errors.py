"""The router's error tree, and the one place that turns errors into answers.

Errors of `adapters.errors` carry the same three attributes and are answered in the same place.
`retryable`: the same request may succeed on other workers or later.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from adapters.errors import AdapterError

RETRY_AFTER_S = 1  # the default of the header


class RouterError(Exception):
    """Any reason why a request is not answered with 200."""

    code = "internal_error"
    http_status = 500
    retryable = False
    param: str | None = None  # the request's field

    def __init_subclass__(cls, **named: Any) -> None:
        """`code`, `http_status`, `retryable` and `param`; what a class does not name, it has from its base."""
        super().__init_subclass__()
        for name, value in named.items():
            setattr(cls, name, value)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        http_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """The first three override the class's, `retry_after_s` overrides RETRY_AFTER_S."""
        super().__init__(message)
        self.param = param or self.param
        self.code = code or self.code
        self.http_status = http_status or self.http_status
        self.retry_after_s = retry_after_s
        self.headers: dict[str, str] = {}  # more of the answer's


class RequestError(RouterError, code="invalid_request", http_status=400):
    """The client's mistake, or a request that this cluster cannot serve."""


class InvalidBody(RequestError, code="invalid_body"):
    """Not a JSON object in UTF-8."""


class InvalidField(RequestError, code="invalid_field"):
    """A field has a wrong type or value."""


class InvalidUpload(RequestError, code="invalid_upload"):
    """An adapter's files in an unsupported form."""


class BodyTooLarge(RequestError, code="body_too_large", http_status=413):
    """The body is larger than is accepted."""


class BodyTooSlow(RequestError, code="body_too_slow", http_status=408):
    """The body did not arrive in time."""


class Unauthenticated(RequestError, code="invalid_api_key", http_status=401):  # OpenAI's code
    """No key or token, or one that is not valid."""


class CredentialInQuery(RequestError, code="credential_in_query"):
    """A key in the URL, where logs keep it."""


class Forbidden(RequestError, code="insufficient_scope", http_status=403):
    """The key or token lacks the scope, or is of another tenant."""


class UnknownPath(RequestError, code="unknown_path", http_status=404):
    """Nothing is there."""


class NotOffered(RequestError, code="not_offered", http_status=404):
    """404 and not 501, which clients try again."""


class WrongMethod(RequestError, code="wrong_method", http_status=405):
    """The path does not take this method."""


class ManagementOff(RequestError, code="management_off", http_status=403):
    """Adapter management is disabled."""


class ForeignPage(RequestError, code="foreign_page", http_status=403):
    """A page of another site calls a listener that asks for no key."""


class ConsoleRefused(RequestError, code="console_refused", http_status=403):
    """A call through the admin listener that is not the console's own."""


class UnknownWorker(RequestError, code="unknown_worker"):
    """No such worker, or one that holds no adapters."""


class UnknownModel(RequestError, code="model_not_found", http_status=404):
    """Neither the base model nor an adapter."""


class ConflictingAdapters(RequestError, code="conflicting_adapters"):
    """`adapter` and `model` name different adapters."""


class NeedsUnifiedWorker(RequestError, code="unified_worker_needed", http_status=422):
    """An adapter that no worker of this cluster can ever apply."""


class AdapterRevisionGone(RequestError, code="adapter_revision_gone", http_status=410):
    """A memory-only revision that no worker has any more."""


class Busy(RouterError, http_status=429, retryable=True):
    """Too much of what this router, or a tenant, may do at a time."""


class Unavailable(RouterError, http_status=503, retryable=True):
    """What the request needs is not there now."""


class TooManyUploads(Busy, code="too_many_uploads"):
    """The limit of concurrent uploads is reached."""


class TooManyCatalogCalls(Busy, code="too_many_catalog_calls"):
    """Too many requests of the tenant ask the catalog."""


class TooManyTrainingCalls(Busy, code="too_many_training_calls"):
    """Too many calls of the tenant, or of all, are at the trainer."""


class QuotaExceeded(Busy, code="rate_limit_exceeded"):  # OpenAI's code
    """The tenant, key or adapter has reached a limit of its quota."""


class QueueFull(Busy, code="queue_full"):
    """The fleet is saturated, and enough of the tenant's requests wait."""


class QueuedTooLong(Busy, code="queued_too_long"):
    """The fleet is saturated, and the tenant's turn did not come in time."""


class TooManyBytes(Busy, code="too_many_bytes"):
    """The bodies of all requests in flight reach their limit."""


class PushFailed(RouterError, code="push_failed", http_status=502, retryable=True):
    """No worker could load the new revision."""


class NoWorkerAvailable(Unavailable, code="no_worker_available"):
    """No suitable worker is placeable now."""


class RouterExhausted(Unavailable, code="router_exhausted"):
    """What the router lacks on its own host says nothing about workers: it is neither retried nor held against them."""


class AdapterRefused(RouterError, param="adapter"):
    """An AdapterError of the worker, with its code, status and message."""


class AttemptError(RouterError, code="worker_failed", http_status=502, retryable=True):
    """An attempt failed. `worker` is the one at fault."""

    def __init__(self, message: str, *, worker: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.worker = worker


class WorkerLost(AttemptError, code="worker_lost"):
    """The connection or the engine was lost, or the engine hangs."""

    def __init__(
        self, message: str, *, worker: str, was_reached: bool = True, has_broken_connection: bool = False
    ) -> None:
        super().__init__(message, worker=worker)
        self.was_reached = was_reached  # False: no connection in time, so the engine has not seen the request
        self.has_broken_connection = has_broken_connection  # seen by this router itself, not told by the agent


class WorkerGaveBack(WorkerLost):
    """No failure: the worker changes its role, and had not begun the request."""


class WorkerStalled(AttemptError, code="worker_stalled", http_status=504):
    """`workers` are all that the request waited for; which one is at fault is unknown."""

    def __init__(self, message: str, *, workers: tuple[str, ...]) -> None:
        super().__init__(message, worker=workers[0])
        self.workers = workers


class EngineFailure(AttemptError, code="engine_failure"):
    """The engine failed, or is overloaded (503)."""

    def __init__(self, message: str, *, worker: str, has_failed_transfer: bool = False, **details: Any) -> None:
        super().__init__(message, worker=worker, **details)
        self.has_failed_transfer = has_failed_transfer  # of KV, with the other worker of the pair


class EngineAborted(AttemptError, code="engine_aborted", http_status=503):
    """The engine aborted the request."""


class EngineRefusal(AttemptError, code="invalid_request", http_status=400, retryable=False):
    """The engine rejected the request. Carries the engine's status and message."""


class AdapterNotResident(AttemptError, code="adapter_not_resident", http_status=503):
    """The adapter left the engine between loading and use."""


class AdapterUnavailable(AttemptError, code="adapter_unavailable", http_status=503, param="adapter"):
    """A transient failure of a worker to load an adapter, with the worker's own code and retry-after if it gave them.

    503 and not 429, because the workers are overloaded and not this client.
    """


class BrokenAnswer(AttemptError, code="broken_answer"):
    """The answer is incomplete or unreadable."""


class DeadlineExceeded(RouterError, code="deadline_exceeded", http_status=504):
    """A worker missed a deadline."""


class TrainerUnavailable(Unavailable, code="trainer_unavailable"):
    """The trainer cannot be reached, or was lost."""


class TrainerRefused(RequestError, code="refused_by_trainer"):
    """Its answer is a 4xx or 5xx. In the audit log only."""


class IdentityUnavailable(Unavailable, code="identity_unavailable"):
    """Keys cannot be checked yet."""


class Stopping(Unavailable, code="router_stopping"):
    """This router is shutting down."""


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
