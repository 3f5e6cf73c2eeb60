"""Errors: one shape for clients, whatever an engine or an agent said."""

import json

import grpc
import pytest

from adapters.errors import AdapterMalformed
from cluster.control import service as control_service
from engine.hooks.uses import NOT_RESIDENT_STATUS
from router import errors
from router.errors import (
    AdapterNotResident,
    AdapterRefused,
    AdapterUnavailable,
    DeadlineExceeded,
    EngineFailure,
    EngineRefusal,
    WorkerLost,
    answer_of,
)
from router.fleet import worker_errors
from router.fleet.worker_errors import engine_error, ensure_adapter_error

# An engine refuses prompts of as many tokens as its bound, too.
FULL_CACHE = (
    "Input length (900 tokens) exceeds the maximum allowed length (891 tokens). "
    "Use a shorter input or enable --allow-auto-truncate."
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidField("n is wrong", param="n"), 400, "invalid_request_error", "invalid_field"),
        (errors.UnknownModel("no such"), 404, "invalid_request_error", "model_not_found"),
        (AdapterMalformed("cut off"), 422, "invalid_request_error", "adapter_malformed"),
        (errors.Stopping("bye"), 503, "server_error", "router_stopping"),
        (ValueError("s3cret"), 500, "server_error", "internal_error"),
    ],
)
def test_answers(error: Exception, status: int, kind: str, code: str) -> None:
    answer = answer_of(error)
    shown = json.loads(answer.body)["error"]
    assert (answer.status, shown["type"], shown["code"]) == (status, kind, code)
    assert "s3cret" not in shown["message"]
    assert shown["param"] == getattr(error, "param", None)
    assert ("retry-after" in answer.headers) is (status == 503)
    assert answer.event == b"data: " + answer.body + b"\n\n"


def test_every_error_has_its_own_code() -> None:
    def family(kind: type[errors.RouterError]) -> list[type[errors.RouterError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in family(child))]

    named = [kind for kind in family(errors.RouterError) if "code" in kind.__dict__ and kind is not EngineRefusal]
    assert len({kind.code for kind in named}) == len(named) > 10  # a refusal of an engine is an invalid request, too
    assert all(400 <= kind.http_status < 600 for kind in named)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"object": "error", "message": "Prompt cannot be empty", "code": 400}, EngineRefusal, "cannot be empty"),
        (404, {"detail": "Not Found"}, EngineRefusal, "refused"),
        (500, {"object": "error", "message": "Internal: s3cret", "code": 500}, EngineFailure, "status 500"),
        (503, {"error": {"message": "s3cret", "code": 503}}, EngineFailure, "too many requests"),
        (200, {"error": {"message": "too long", "type": "x", "code": 400}}, EngineRefusal, "too long"),
        (200, {"error": {"message": "s3cret", "type": "x", "code": 500}}, EngineFailure, "status 500"),
        (424, {"message": "LoRA adapters are not loaded: x\nLoaded adapters: s3cret"}, AdapterNotResident, "left"),
        (400, {"message": "min_p: LoRA adapters are not loaded", "code": 400}, EngineRefusal, "min_p"),
        (400, {"message": "min_p: Got LoRA adapter that has never been loaded", "code": 400}, EngineRefusal, "min_p"),
    ],
)
def test_engine_answers(status: int, body: dict, kind: type, message: str) -> None:
    error = engine_error(status, json.dumps(body).encode(), "d0")
    assert type(error) is kind
    assert message in str(error)
    assert "s3cret" not in str(error)
    assert error.retryable is (kind is not EngineRefusal)
    own_status = {EngineRefusal: 400 if status == 200 else status, AdapterNotResident: 503}
    assert error.http_status == own_status.get(kind, 503 if status == 503 else 502)
    assert (error.code == "engine_busy") is (status == 503)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("The input (3 tokens) is longer than the model's context length (2 tokens).", "context_length_exceeded"),
        (FULL_CACHE, "context_length_exceeded"),
        (f"tools: {FULL_CACHE}", "invalid_request"),
        ("tools: 'is longer than the model's context length'", "invalid_request"),
        ("x The input (3 tokens) is longer than the model's context length (2 tokens).", "invalid_request"),
    ],
)
def test_a_code_is_not_chosen_by_a_text_that_quotes_the_client(message: str, code: str) -> None:
    assert engine_error(400, json.dumps({"message": message, "code": 400}).encode(), "d0").code == code


@pytest.mark.parametrize(
    ("status", "message", "is_transfer"),
    [
        (500, "Prefill bootstrap failed for request rank=0 req.rid='a' req.bootstrap_room=1", True),
        (500, "Decode transfer failed for request a request.bootstrap_room=1: x", True),
        (500, "Decode handshake failed for request rank=0", True),
        (503, "Prefill transfer failed for request rank=0", False),
        (500, "bad value 'Prefill transfer failed for request rank=0'", False),
    ],
)
def test_a_failed_transfer_is_told_apart(status: int, message: str, is_transfer: bool) -> None:
    error = engine_error(status, json.dumps({"message": message, "code": status}).encode(), "d0")
    assert isinstance(error, EngineFailure)
    assert error.has_failed_transfer is is_transfer


def test_engine_answer_that_is_no_json() -> None:
    assert engine_error(502, b"<html>", "d0").http_status == 502


NUMBER = "{'type': 'x', 'loc': ('body', 'top_p'), 'msg': 'Input is no number', 'input': 's3cret'}"
PROBLEM = "{'type': 'x', 'loc': ('body',), 'msg': 'Value error, bad \\'it\\'', 'input': {'lora_path': 's3cret'}}"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (FULL_CACHE, "The input (900 tokens) is longer than the longest that is served here (890 tokens)."),
        ("Failed: [08:50:50] /project/cpp/schema.cc:2999: minLength must be\n", "Failed: minLength must be"),
        ("No adapter of /srv/a.py is here", "No adapter of /srv/a.py is here"),  # no place in a source
        (f"1 validation error:\n  {PROBLEM}\n\n  Endpoint: POST /v1/completions [{PROBLEM}]", "bad 'it'"),
        (f"1 validation error:\n  {NUMBER}\n\n  Endpoint: x [{NUMBER}]", "top_p: Input is no number"),
    ],
)
def test_an_engine_s_words_are_made_those_of_the_client(message: str, said: str) -> None:
    error = engine_error(400, json.dumps({"message": message, "code": 400}).encode(), "d0")
    assert (str(error).strip(), error.param) == (said, "top_p" if "top_p" in said else None)


@pytest.mark.parametrize(("status", "code"), [(400, 400), (200, 400)])
def test_of_a_text_that_quotes_the_client_little_is_searched_and_passed_on(status: int, code: int) -> None:
    """SGLang says all of a schema that is none: to search 128 KiB of `/a` for a place in a source took a minute."""
    message = f"Tool 0 function has invalid 'parameters' schema: '{'/a' * 100_000}' is not valid"
    error = engine_error(status, json.dumps({"message": message, "code": code}).encode(), "d0")
    assert isinstance(error, EngineRefusal)
    assert str(error) == message[:1000]


def test_a_validation_dump_that_cannot_be_read_hides_the_request() -> None:
    unreadable = json.dumps({"message": "1 validation error:\n  ??? s3cret", "code": 400}).encode()
    assert "s3cret" not in str(engine_error(400, unreadable, "d0"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, WorkerLost),
        (grpc.StatusCode.CANCELLED, WorkerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, AdapterUnavailable),
        (grpc.StatusCode.UNKNOWN, AdapterUnavailable),
    ],
)
def test_ensure_adapter(status: grpc.StatusCode, kind: type) -> None:
    error = ensure_adapter_error(status, "10.0.0.1: s3cret", {}, "p0")
    assert type(error) is kind
    assert error.param == ("adapter" if kind is AdapterUnavailable else None)
    assert "s3cret" not in str(error)


def test_a_router_without_descriptors_does_not_lose_its_workers() -> None:
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: socket: Too many open files (24)"
    )
    error = ensure_adapter_error(grpc.StatusCode.UNAVAILABLE, details, {}, "p0")
    assert type(error) is errors.RouterExhausted
    assert (error.http_status, error.retryable) == (503, True)
    assert "10.0.0.1" not in str(error)


def test_what_is_told_of_an_adapter_is_spelled_as_by_the_agents_and_engines() -> None:
    assert worker_errors.NOT_RESIDENT_STATUS == NOT_RESIDENT_STATUS
    assert (worker_errors.ERROR_CODE_KEY, worker_errors.HTTP_STATUS_KEY) == (
        control_service.ERROR_CODE_KEY,
        control_service.HTTP_STATUS_KEY,
    )


@pytest.mark.parametrize("code", ["adapter_store_corrupt", "adapter_store_conflict", "adapter_revision_not_stored"])
def test_a_worker_that_names_the_store_is_not_quoted(code: str) -> None:
    metadata = {worker_errors.ERROR_CODE_KEY: code, worker_errors.HTTP_STATUS_KEY: "404"}
    error = ensure_adapter_error(grpc.StatusCode.FAILED_PRECONDITION, "s3://bucket has it not", metadata, "p0")
    assert isinstance(error, AdapterRefused)
    assert (error.code, error.http_status, error.param) == (code, 404, "adapter")
    assert "bucket" not in str(error)


def test_a_worker_in_trouble_says_when_to_try_again() -> None:
    metadata = {
        worker_errors.ERROR_CODE_KEY: "adapter_store_unavailable",
        worker_errors.HTTP_STATUS_KEY: "503",
        worker_errors.RETRY_AFTER_KEY: "2.5",
    }
    answer = answer_of(ensure_adapter_error(grpc.StatusCode.FAILED_PRECONDITION, "s3://bucket is away", metadata, "p0"))
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "adapter_store_unavailable", "3")
    assert b"bucket" not in answer.body


@pytest.mark.parametrize("said", ["", "nan", "inf", "-1", "0.01"])
def test_no_time_to_try_again(said: str) -> None:
    metadata = {worker_errors.RETRY_AFTER_KEY: said}
    error = ensure_adapter_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata, "p0")
    assert answer_of(error).headers["retry-after"] == "1"
