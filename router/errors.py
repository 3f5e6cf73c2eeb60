"""What can go wrong on a request's way, and the one place that turns it into an answer.

    RouterError
    ├── RequestError                 the client's request cannot be served as it is
    │   ├── InvalidBody              not a JSON object in UTF-8
    │   ├── InvalidField             a field that routes has a wrong type or value
    │   ├── RefusedField             a field that only Prelude may give an engine
    │   ├── BodyTooLarge, BodyTooSlow
    │   ├── UnknownPath, WrongMethod
    │   ├── UnknownModel             neither the base model nor an adapter
    │   └── ConflictingAdapters      `adapter` and `model` name different adapters
    ├── NoPlaceablePair              no pair of workers can take a request now
    ├── AdapterRefused               the prefill worker will never load this adapter; says why
    ├── ExchangeError                a pair was tried and failed
    │   ├── WorkerLost               its connection or its engine went away
    │   ├── EngineFailure            it answered 5xx
    │   ├── EngineAborted            it gave the request up
    │   ├── EngineRefusal            it answered 4xx: the request is wrong
    │   ├── AdapterUnavailable       the prefill worker could not load the adapter now
    │   ├── AdapterNotResident       the adapter left the engine between loading and use
    │   └── BrokenAnswer             it sent what cannot be read
    ├── DeadlineExceeded             somebody took too long
    └── Stopping                     this router is shutting down

Errors of `adapters.errors` carry the same three attributes and are answered in the same place.
`retryable` says that the same request may succeed on another pair or a moment later.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import grpc
import msgspec

from adapters.errors import AdapterError

RETRY_AFTER_S = 1  # what clients are told when trying again may help


class RouterError(Exception):
    """Any reason why a request is not answered with 200."""

    code = "internal_error"
    http_status = 500
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestError(RouterError):
    code = "invalid_request"
    http_status = 400


class InvalidBody(RequestError):
    code = "invalid_body"


class InvalidField(RequestError):
    code = "invalid_field"


class RefusedField(RequestError):
    code = "refused_field"


class BodyTooLarge(RequestError):
    code = "body_too_large"
    http_status = 413


class BodyTooSlow(RequestError):
    code = "body_too_slow"
    http_status = 408


class UnknownPath(RequestError):
    code = "unknown_path"
    http_status = 404


class WrongMethod(RequestError):
    code = "wrong_method"
    http_status = 405


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404


class ConflictingAdapters(RequestError):
    code = "conflicting_adapters"


class NoPlaceablePair(RouterError):
    code = "no_worker_available"
    http_status = 503
    retryable = True


class AdapterRefused(RouterError):
    code = "adapter_refused"
    http_status = 400


class ExchangeError(RouterError):
    """A pair failed. `worker` is the one at fault."""

    code = "worker_failed"
    http_status = 502
    retryable = True

    def __init__(self, message: str, *, worker: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.worker = worker


class WorkerLost(ExchangeError):
    code = "worker_lost"


class EngineFailure(ExchangeError):
    code = "engine_failure"


class EngineAborted(ExchangeError):
    code = "engine_aborted"
    http_status = 503


class EngineRefusal(ExchangeError):
    """The engine found the request wrong. Carries the engine's status and message."""

    code = "invalid_request"
    retryable = False

    def __init__(self, message: str, *, worker: str, http_status: int = 400, param: str | None = None) -> None:
        super().__init__(message, worker=worker, param=param)
        self.http_status = http_status
        if "context length" in message:
            self.code = "context_length_exceeded"  # the code that OpenAI clients look for


class AdapterNotResident(ExchangeError):
    code = "adapter_not_resident"
    http_status = 503


class AdapterUnavailable(ExchangeError):
    code = "adapter_unavailable"
    http_status = 503


class BrokenAnswer(ExchangeError):
    code = "broken_answer"


class DeadlineExceeded(RouterError):
    code = "deadline_exceeded"
    http_status = 504


class Stopping(RouterError):
    code = "router_stopping"
    http_status = 503
    retryable = True


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error in OpenAI's shape."""

    status: int
    code: str
    body: bytes  # {"error": {...}}
    retryable: bool

    @property
    def headers(self) -> dict[str, str]:
        retry = {"retry-after": str(RETRY_AFTER_S)} if self.retryable else {}
        return {"content-type": "application/json", **retry}

    @property
    def event(self) -> bytes:
        """The same as the last event of a stream that had begun."""
        return b"data: " + self.body + b"\n\n"


def answer_of(error: BaseException) -> ErrorAnswer:
    """How `error` is told to the client. What neither tree knows tells nothing but that it happened."""
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
    return ErrorAnswer(status, code, msgspec.json.encode(body), error.retryable)


def _type_of(status: int) -> str:
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )


# ---- what workers say -------------------------------------------------------------------------------------------

_ADAPTER_FAULTS = {  # gRPC status of EnsureAdapter -> the HTTP status of an adapter that cannot be served
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 422,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.DATA_LOSS: 422,
    grpc.StatusCode.OUT_OF_RANGE: 413,
}


def ensure_adapter_error(status: grpc.StatusCode, details: str, worker: str) -> RouterError:
    """What a failed EnsureAdapter means for the request that waited for it."""
    if http_status := _ADAPTER_FAULTS.get(status):
        refused = AdapterRefused(details, param="adapter")
        refused.http_status = http_status
        return refused
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the adapter was not loaded in time: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return AdapterUnavailable(f"worker {worker} is loading too many adapters: {details}", worker=worker)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return WorkerLost(f"worker {worker} went away while it loaded the adapter", worker=worker)
    return AdapterUnavailable(f"worker {worker} could not load the adapter: {details}", worker=worker)


class _EngineError(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _EngineErrorBody(msgspec.Struct):
    """Both of the engine's shapes: {"object": "error", "message": ...} and {"error": {"message": ...}}."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None
    error: _EngineError | None = None


def engine_error(status: int, body: bytes, worker: str) -> ExchangeError:
    """What an engine's answer other than 200 means. `body` is the answer, or the data of an error event.

    Texts of 5xx answers stay inside: they are the engine's own trouble and may quote anything.
    """
    try:
        parsed = msgspec.json.decode(body, type=_EngineErrorBody)
    except msgspec.MsgspecError:
        parsed = _EngineErrorBody(message=body[:200].decode("utf-8", "replace"))
    said = parsed.error or parsed
    if status == 200 and isinstance(said.code, int):
        status = said.code
    if "LoRA adapters are not loaded" in said.message:  # the text goes on with other tenants' revisions
        return AdapterNotResident(f"the adapter left worker {worker} before it was used", worker=worker)
    if 400 <= status < 500 and status not in (408, 429, 499):
        message, param = _readable(said.message, said.param)
        return EngineRefusal(
            message or "the engine refused the request", worker=worker, http_status=status, param=param
        )
    return EngineFailure(f"the engine of worker {worker} failed with status {status}", worker=worker)


# One problem of FastAPI's validation text: "  {'type': ..., 'loc': ('body', 'n'), 'msg': '...', 'input': ...}"
_PROBLEM = re.compile(
    r"""^\ \ \{'type':\ '[^']*',\ 'loc':\ \((?P<loc>[^)]*)\),\ 'msg':\ (?P<msg>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""",
    re.VERBOSE | re.MULTILINE,
)


def _readable(message: str, param: str | None) -> tuple[str, str | None]:
    """FastAPI's dump of a request (ours, with its internal fields) as "field: what is wrong", else the text itself."""
    problems = []
    for problem in _PROBLEM.finditer(message):
        location = [part.strip().strip("'") for part in problem["loc"].split(",") if part.strip()][1:]
        text = str(ast.literal_eval(problem["msg"])).removeprefix("Value error, ")
        problems.append((location, text))
    if not problems:
        if "validation error" in message:
            return "a field of the request has a wrong type or value", param
        return message, param
    first_location = problems[0][0]
    shown = dict.fromkeys(f"{location[0]}: {text}" if location else text for location, text in problems)
    return "; ".join(list(shown)[:4]), param or (first_location[0] if first_location else None)
