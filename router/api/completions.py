"""POST /v1/chat/completions and the other inference endpoints: one request from its first byte to its log line."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from functools import cache, lru_cache
from typing import Any

from adapters.errors import AdapterError
from cluster.config.router import SloConfig
from process.log import info
from process.tracing.span import Span, Tracing
from router.api import client_deadline
from router.api.used_tokens import UsedTokens
from router.errors import RouterError, Stopping, answer_of
from router.generation.backends import Backends
from router.generation.client_answer import ClientAnswer
from router.generation.generation import Generation, Wording
from router.generation.request_state import Requests, RequestState
from router.http.client_connection import SCOPE_KEY, ClientConnection
from router.identity.audit import AuditLog
from router.identity.principal import Principal, principal_of
from router.protocol.body_room import BodyRoom, BodyShare
from router.protocol.field_values import Limits
from router.protocol.request_body import ClientGone
from router.protocol.responses.response import Response
from router.protocol.responses.wording import ResponseWording
from router.protocol.sse import Signature
from router.protocol.validation import Endpoint, validate
from router.quotas.quotas import Admission, Quotas
from router.quotas.request_use import grammar_of, most_output_tokens, use_of
from router.revisions.adapter_service import AdapterService
from router.revisions.resolve import Target, resolve

_CLIENT_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_CLIENT_LEFT = 499  # nginx's status for a closed connection; for metrics and logs only

log = logging.getLogger(__name__)


class CompletionsEndpoint:
    """One of the inference endpoints as an ASGI application."""

    def __init__(
        self,
        endpoint: Endpoint,
        backends: Backends,
        adapters: AdapterService,
        requests: Requests,
        room: BodyRoom,
        audit: AuditLog,
        quotas: Quotas,
        *,
        limits: Limits,
        fingerprint: str,
        tracing: Tracing,
    ) -> None:
        self._endpoint = endpoint
        self._backends = backends
        self._adapters = adapters
        self._requests = requests
        self._room = room
        self._audit = audit
        self._quotas = quotas
        self._limits = limits
        self._fingerprint = fingerprint
        # A metric's own `labels` costs several times what counting does. Label values are few.
        self._labelled = cache(lambda metric, *values: metric.labels(endpoint.label, *values))
        self._used_tokens = UsedTokens()
        self._tracing = tracing
        self._span_name = f"POST {endpoint.value}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        connection = scope.pop(SCOPE_KEY)  # it refers to the scope: together they would wait for the collector
        principal = principal_of(scope)
        with (
            self._requests.record(scope["request_id"], self._endpoint.label, _client_request_id(headers)) as request,
            self._tracing.begin(self._span_name, headers) as request.span,
            self._room.share(principal.confined_to) as share,
        ):
            client = ClientAnswer(connection, request, timeout_s=self._backends.config.event_gap_timeout_s)
            has_disconnected = False
            try:
                if (deadline := headers.get(client_deadline.HEADER)) is None:
                    await self._serve(headers, receive, share, request, client, connection, principal)
                else:
                    async with client_deadline.client_deadline(deadline, request.age_s):
                        await self._serve(headers, receive, share, request, client, connection, principal)
            except ClientGone:
                has_disconnected = True
            except (RouterError, AdapterError) as error:
                self._audit.denied(scope, principal, error)
                await client.fail(answer_of(error))
            except asyncio.CancelledError:  # by the server, at the drain timeout
                await client.fail(answer_of(Stopping("the router is stopping")))
            except Exception as error:  # the edge of this request
                log.exception("request failed", extra={"fields": {"request_id": request.request_id}})
                await client.fail(answer_of(error))
            finally:
                self._record(request, client, _CLIENT_LEFT if has_disconnected else client.status)

    async def _serve(
        self,
        headers: dict[bytes, bytes],
        receive: Any,
        share: BodyShare,
        request: RequestState,
        client: ClientAnswer,
        connection: ClientConnection,
        principal: Principal,
    ) -> None:
        request.principal = principal.name
        with self._quotas.admission(principal) as admission:
            try:
                await self._serve_admitted(headers, receive, share, request, client, connection, principal, admission)
            finally:
                admission.settle(*self._used_tokens.of(request, client.status))

    async def _serve_admitted(
        self,
        headers: dict[bytes, bytes],
        receive: Any,
        share: BodyShare,
        request: RequestState,
        client: ClientAnswer,
        connection: ClientConnection,
        principal: Principal,
        admission: Admission,
    ) -> None:
        config = self._backends.config
        with request.span.child("admission"):
            body = await share.read(
                headers,
                receive,
                max_bytes=config.max_body_bytes,
                timeout_s=config.body_timeout_s,
                on_bytes=admission.take_bytes,
                arrived=connection.arrived_body,
            )
            validated = await self._room.decode(validate, self._endpoint, body, self._limits, num_bytes=len(body))
            del body  # of which its fields are parts, or, for a response, translations
        request.is_streaming = validated.is_streaming
        wants_explanations = headers.get(b"x-prelude-debug") == b"placement"
        # They name workers, and what others' prompts have left in prefix caches.
        request.wants_explanations = config.debug_header and wants_explanations and principal.crosses_tenants
        with request.span.child("resolve"):
            target = await resolve(validated, self._backends.model, self._adapters, principal)
        client.headers |= _target_headers(target, request)
        if admission.is_counted:
            prompt_tokens = self._backends.prompts.estimate(validated.fields, validated.prompts)
            request.most_output_tokens = most_output_tokens(validated)
            admission.take(use_of(validated, prompt_tokens), request.adapter, grammar_of(validated.fields))
            client.headers |= admission.headers()
        fingerprint, revision = self._fingerprint, target.revision
        is_shared = config.share_base_prefixes if revision is None else revision.shares_prefixes  # between tenants
        if revision is not None:
            fingerprint = f"{fingerprint}-{_short(revision.revision_id)}"
        wording: Wording
        if validated.form is None:
            wording = _signature(fingerprint, self._backends.model, target.requested_model, is_shared)
        else:
            response = Response(validated.form, request.request_id, model=validated.model, fingerprint=fingerprint)
            wording = response_wording = ResponseWording(response, hides_cached_tokens=is_shared)
            client.error_event = response_wording.failed
        namespace = self._adapters.directory.cache_namespace(principal.tenant, is_shared=is_shared)
        generation = Generation(self._backends, validated, target, request, client, wording, namespace, principal)
        work = _run_in_turn(generation, request, admission, headers) if admission.is_counted else generation.run()
        await _run_while_connected(connection, client, work)

    def _record(self, request: RequestState, client: ClientAnswer, status: int | None) -> None:
        """Write the log line and the metrics of a finished request. No prompt, no header."""
        metrics, labelled = self._backends.metrics, self._labelled
        duration_s = request.age_s
        labelled(metrics.requests, str(status)).inc()
        labelled(metrics.duration).observe(duration_s)
        if request.first_byte_s is not None:
            labelled(metrics.first_byte).observe(request.first_byte_s)
        if client.stream_error is not None:
            labelled(metrics.stream_errors, client.stream_error).inc()
        elif status == 200:
            self._record_times(request, duration_s)
        if request.adapter is not None:
            metrics.busiest_adapters.count(request.adapter)
        if request.span.trace_id is not None:
            _describe(request.span, request, self._endpoint.value, client, status)
        self._log(request, client, status, duration_s)

    def _record_times(self, request: RequestState, duration_s: float) -> None:
        """Record how fast a complete answer was."""
        metrics, labelled = self._backends.metrics, self._labelled
        first_s = request.first_byte_s
        # [DONE] is an event, too.
        num_events = (request.num_completion_tokens or 1) if first_s is None else request.num_events - 1
        num_sequences = max(1, len(request.sequences))
        num_gaps = num_events // num_sequences - 1
        if first_s is not None and num_gaps > 0:
            labelled(metrics.event_gap).observe((duration_s - first_s) / num_gaps)
        # Of a busy engine, an event has several tokens.
        num_later = max(num_events, request.num_completion_tokens or 0) // num_sequences - 1
        met = keeps_slo(self._backends.config.slo, num_later, first_s, duration_s)
        labelled(metrics.slo_requests, "true" if met else "false").inc()

    def _log(self, request: RequestState, client: ClientAnswer, status: int | None, duration_s: float) -> None:
        sequences, first_byte_s = request.sequences, request.first_byte_s
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "client_request_id": request.client_request_id,
            "trace_id": request.span.trace_id,
            "endpoint": self._endpoint.label,
            "principal": request.principal,
            "adapter": request.adapter,
            "revision": request.revision_id,
            "placements": sorted({str(s.placement) for s in sequences if s.placement}),
            "status": status,
            "stream_error": client.stream_error,
            "choices": len(sequences),
            "attempts": sum([s.num_attempts for s in sequences]),
            "events": request.num_events or None,
            "completion_tokens": request.num_completion_tokens,
            "ensure_adapter_s": round(max([s.ensure_adapter_s for s in sequences], default=0.0), 4),
            "first_byte_s": first_byte_s and round(first_byte_s, 4),
            "duration_s": round(duration_s, 4),
        }
        info(log, "request", {name: value for name, value in fields.items() if value is not None})


def keeps_slo(slo: SloConfig, num_later: int, first_event_s: float | None, duration_s: float) -> bool:
    """Whether an answer with so many tokens after the first met `router.slo`. No first event: it was not streamed."""
    rest_s = slo.event_gap_s * max(0, num_later)
    if first_event_s is None:
        return duration_s <= slo.first_token_s + rest_s
    return first_event_s <= slo.first_token_s and duration_s - first_event_s <= rest_s + slo.event_gap_s


async def _run_in_turn(
    generation: Generation, request: RequestState, admission: Admission, headers: dict[bytes, bytes]
) -> None:
    with await admission.turn(headers) as turn:
        request.on_placed = None if turn is None else turn.placed
        await generation.run()


def _target_headers(target: Target, request: RequestState) -> dict[str, str]:
    """The headers that name the adapter. Also records the adapter in the request's state."""
    if target.revision is None:
        return {}
    request.adapter, request.revision_id = target.revision.full_name, target.revision.revision_id
    headers = {"x-prelude-adapter": request.adapter, "x-prelude-revision": request.revision_id}
    if (trained := target.revision.manifest.trained_positions) is not None:
        headers["x-prelude-trained-positions"] = trained  # and it is applied to others
    return headers


def _describe(span: Span, request: RequestState, route: str, client: ClientAnswer, status: int | None) -> None:
    """Give a finished request's span its attributes."""
    attributes: dict[str, str | int | bool | None] = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "prelude.request_id": request.request_id,
        "prelude.adapter": request.adapter,
        "prelude.revision": request.revision_id,
        "prelude.streaming": request.is_streaming,
        "prelude.sequences": len(request.sequences),
        "prelude.attempts": sum(s.num_attempts for s in request.sequences),
        "gen_ai.usage.output_tokens": request.num_completion_tokens,
    }
    span.set({name: value for name, value in attributes.items() if value is not None})
    if client.stream_error is not None:
        span.fail(client.stream_error)
    elif status is not None and status >= 500:
        span.fail(str(status))


@lru_cache(maxsize=1024)
def _signature(fingerprint: str, engine_model: str, requested_model: str, hides_cached_tokens: bool) -> Signature:
    """The Signature for a target. It is stateless, so all requests for the target share it."""
    return Signature(
        fingerprint,
        engine_model=engine_model,
        requested_model=requested_model,
        hides_cached_tokens=hides_cached_tokens,
    )


def _short(revision_id: str) -> str:
    return revision_id.removeprefix("sha256:")[:12]


def _client_request_id(headers: dict[bytes, bytes]) -> str | None:
    """The client's own id, for the log only, if its characters are safe."""
    given = headers.get(b"x-request-id")
    return given.decode() if given is not None and _CLIENT_REQUEST_ID.fullmatch(given) else None


async def _run_while_connected(
    connection: ClientConnection, client: ClientAnswer, work: Coroutine[Any, Any, None]
) -> None:
    """Run `work`. If the client closes its connection, cancel it and raise ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def leave() -> None:
        nonlocal has_left
        if not client.is_complete:  # a disconnect after the last byte ends nothing
            has_left = True
            task.cancel()

    connection.watch(leave)
    try:
        await work
    finally:
        connection.unwatch()
        if has_left:
            task.uncancel()
            raise ClientGone
