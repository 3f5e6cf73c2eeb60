"""Maps failures of workers to router errors: HTTP answers of engines and gRPC statuses of agents."""

import ast
import math
import re
from collections.abc import Mapping

import grpc
import msgspec

from cluster.errors import ERROR_CODE_KEY, HTTP_STATUS_KEY, RETRY_AFTER_KEY
from process.exhaustion import is_exhaustion_text
from router.errors import (
    AdapterNotResident,
    AdapterRefused,
    AdapterUnavailable,
    AttemptError,
    DeadlineExceeded,
    EngineFailure,
    EngineRefusal,
    RouterExhausted,
    WorkerLost,
)
from router.public_errors import public_message


def ensure_adapter_error(
    status: grpc.StatusCode, details: str, metadata: Mapping[str, str], worker: str
) -> AdapterRefused | DeadlineExceeded | RouterExhausted | AttemptError:
    """The error of a request whose call to an agent failed."""
    if ERROR_CODE_KEY in metadata:
        code, http_status = metadata[ERROR_CODE_KEY], int(metadata[HTTP_STATUS_KEY])
        if http_status < 500:
            return AdapterRefused(public_message(code, details), code=code, http_status=http_status)
        # A problem of this worker, such as an unreachable store or a full disk, so another worker may succeed. The
        # details are not passed on because they name addresses and folders.
        return AdapterUnavailable(
            f"worker {worker} cannot load the adapter now ({code}); try again",
            worker=worker,
            code=code,
            http_status=http_status,
            retry_after_s=_retry_after_s(metadata),
        )
    match status:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"worker {worker} did not load the adapter in time")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return AdapterUnavailable(
                f"worker {worker} has a full load queue; try again",
                worker=worker,
                retry_after_s=_retry_after_s(metadata),
            )
        case grpc.StatusCode.UNAVAILABLE if is_exhaustion_text(details):
            return RouterExhausted("this router has no means left to reach a worker's agent; try again soon")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return WorkerLost(f"worker {worker} went away before it had loaded the adapter", worker=worker)
        case _:
            return AdapterUnavailable(f"worker {worker} could not load the adapter", worker=worker)


def _retry_after_s(metadata: Mapping[str, str]) -> float | None:
    try:
        seconds = float(metadata.get(RETRY_AFTER_KEY, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


class _EngineError(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _EngineErrorBody(_EngineError):
    """Both of the engine's shapes: {"object": "error", "message": ...} and {"error": {"message": ...}}."""

    error: _EngineError | None = None


# Characters of an engine's text that are read, logged and passed on. It may quote all of a request, and to search it
# takes time that grows with its square.
_MAX_TEXT = 1000
# The status that the hook `uses_are_noted` gives an engine's answer if the adapter is not there. Texts of errors may
# quote the client, so no class of error depends on them.
NOT_RESIDENT_STATUS = 424
# Engines have no other sign of prompts that are too long. A text that matches as a whole has no room for a client's.
_TOO_LONG = re.compile(
    r"The input \(\d+ tokens\) is longer than the model's context length \(\d+ tokens\)\."
    r"|Requested token count exceeds the model's maximum context length of \d+ tokens\. You requested a total of \d+ "
    r"tokens: \d+ tokens from the input messages and \d+ tokens for the completion\. Please reduce the number of "
    r"tokens in the input messages or the completion to fit within the limit\."
    r"|max_completion_tokens is too large: \d+\.This model supports at most \d+ completion tokens\."
)
# The same where the KV cache is smaller than the model's context. Its remedy is an option that engines are refused.
_TOO_LONG_FOR_THE_CACHE = re.compile(
    r"Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)\. "
    r"Use a shorter input or enable --allow-auto-truncate\."
)
# What libraries in C++ and Python write before a message, or into it.
_SOURCE_PATH = re.compile(r"(?:\[\d\d:\d\d:\d\d\] )?(?:/[\w.+-]+)+\.(?:cc|cpp|cu|h|py|rs):\d+:? ?")
# Nor of KV transfers that fail. The text before a request id, which is the router's, has no room for a client's either.
_TRANSFER_FAILED = re.compile(r"(?:Prefill|Decode) (?:bootstrap|handshake|transfer) failed for request ")


def engine_error(status: int, body: bytes, worker: str) -> AttemptError:
    """The error for an engine's answer that is not a 200. `body` is the answer, or the data of an error event.

    The texts of 5xx answers are not passed on, because they are internal to the engine and may quote anything.
    """
    try:
        parsed = msgspec.json.decode(body, type=_EngineErrorBody)
    except msgspec.MsgspecError:
        parsed = _EngineErrorBody(message=body[:200].decode("utf-8", "replace"))
    reported = parsed.error or parsed
    text = reported.message[:_MAX_TEXT]
    if status == 200 and isinstance(reported.code, int):
        status = reported.code
    if status == NOT_RESIDENT_STATUS:  # its text lists other tenants' revisions
        return AdapterNotResident(f"the adapter left worker {worker} before it was used", worker=worker)
    if status in (401, 403):  # the router's key is that of an engine that was there before, not the client's fault
        return EngineFailure(f"the engine of worker {worker} does not know the router", worker=worker)
    if 400 <= status < 500 and status not in (408, 429, 499):
        message, param = _readable(_SOURCE_PATH.sub("", text), reported.param)
        is_too_long = _TOO_LONG.fullmatch(text) is not None
        if too_long := _TOO_LONG_FOR_THE_CACHE.fullmatch(text):
            message = (
                f"The input ({too_long[1]} tokens) is longer than the longest that is served here "
                f"({int(too_long[2]) - 1} tokens)."
            )
            is_too_long = True
        return EngineRefusal(
            message or "the engine refused the request",
            worker=worker,
            http_status=status,
            param=param,
            code="context_length_exceeded" if is_too_long else None,  # OpenAI's, which clients check
        )
    if status in (429, 503):
        return EngineFailure(
            f"the engine of worker {worker} has too many requests", worker=worker, code="engine_busy", http_status=503
        )
    return EngineFailure(
        f"the engine of worker {worker} failed with status {status}",
        worker=worker,
        has_failed_transfer=status == 500 and _TRANSFER_FAILED.match(text) is not None,
    )


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
        try:
            text = str(ast.literal_eval(problem["msg"])).removeprefix("Value error, ")
        except (SyntaxError, ValueError):  # a line of the client's own
            continue
        problems.append((location, text))
    if not problems:
        if "validation error" in message:
            return "a field of the request has a wrong type or value", param
        return message, param
    first_location = problems[0][0]
    shown = dict.fromkeys(f"{location[0]}: {text}" if location else text for location, text in problems)
    return "; ".join(list(shown)[:4]), param or (first_location[0] if first_location else None)
