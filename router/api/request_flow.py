"""One inference request, from its first byte to its log line.

receive -> validate -> resolve -> admit -> place -> ensure -> relay -> settle: the steps in their order. How a step is
done is in its own module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import Any

from starlette.responses import Response as HttpResponse

from adapters.errors import AdapterError
from router.alias_split import gets_newer
from router.api.request_record import RequestRecorder, UsedTokens
from router.api.request_span import FinishReasons
from router.errors import AdapterRefused, AttemptError, DeadlineExceeded, RouterError, Stopping, answer_of
from router.generation.backends import Backends
from router.generation.client_answer import ClientAnswer, while_connected
from router.generation.request import CLIENT_LEFT, Request, new_request_id
from router.generation.sequence_run import SequenceRun
from router.http.client_connection import SCOPE_KEY
from router.identity.access import Principal, principal_of, set_principal
from router.identity.gate import SCOPE_OF, Gate, Pages, check_scope
from router.protocol.choices import ChoiceStreams, merged_answer
from router.protocol.request_body import ClientGone, read_body
from router.protocol.responses.response import Response
from router.protocol.responses.translator import ResponseTranslator
from router.protocol.sse import AnswerRewriter, answer_counts
from router.protocol.validation import Endpoint, Sequence, validate
from router.quotas.budget import Use
from router.quotas.quotas import Admission
from router.revisions.adapter_service import resolve, scaled_id_of

_JSON = {"content-type": "application/json"}

log = logging.getLogger(__name__)


def error_response(error: Exception) -> HttpResponse:
    """The answer to a request that has failed before its endpoint has answered."""
    answer = answer_of(error)
    return HttpResponse(answer.body, answer.status, answer.headers)


class RouterApp:
    """Gives every HTTP request an id, returned as `x-request-id`, and a principal. Sends it to its endpoint."""

    def __init__(
        self,
        app: Any,
        completions: Mapping[str, RequestFlow],
        backends: Backends,
        gate: Gate,
        pages: Pages,
    ) -> None:
        self.fleet = backends.fleet
        self._app = app  # of all other paths
        self._completions = completions  # by path; these add the header themselves
        self._gate = gate
        self._metrics = backends.metrics
        self._audit = backends.audit
        self._pages = pages
        self._asks_for_keys = backends.config.auth is not None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = new_request_id()
        flow = self._completions.get(scope["path"]) if scope["method"] == "POST" else None
        refusal: Any = None
        principal: Principal | None = None
        if self._pages.has_origins and (headers := self._pages.answer_headers(scope)):
            cycle = scope[SCOPE_KEY].cycle  # answers do not all come by `send`
            cycle.default_headers = [*cycle.default_headers, *headers]
            if (allowed := self._pages.preflight(scope)) is not None:  # browsers send it without a key
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body"})
                return
        try:
            if not self._asks_for_keys:
                self._pages.check(scope)
            principal = self._gate.known(scope) or await self._gate.verified(scope)
            set_principal(scope, principal)
            if flow is not None:
                check_scope(principal, SCOPE_OF["POST", scope["path"]])
        except RouterError as error:
            self._metrics.denials.labels(error.code).inc()
            self._audit.denied(scope, principal, error)
            refusal = error_response(error)
        if flow is not None and refusal is None:
            await flow(scope, receive, send)
            return
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await (refusal or self._app)(scope, receive, send_with_id)


class RequestFlow:
    """One of the inference endpoints, as an ASGI application."""

    def __init__(self, endpoint: Endpoint, backends: Backends) -> None:
        self._endpoint = endpoint
        self._backends = backends
        self._recorder = RequestRecorder(endpoint, backends)
        self._used_tokens = UsedTokens()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        connection = scope.pop(SCOPE_KEY)  # it refers to the scope: together they would wait for the collector
        principal = principal_of(scope)
        request = Request(scope["request_id"], self._endpoint, principal, dict(scope["headers"]))
        backends = self._backends
        with (
            backends.requests.record(request),
            backends.tracing.begin(f"POST {self._endpoint.value}", request.headers) as request.span,
            backends.bodies.room.growing(principal.confined_to) as take,
        ):
            client = ClientAnswer(connection, request, timeout_s=backends.config.event_gap_timeout_s)
            try:
                await self._serve(request, client, take, receive)
            except ClientGone:
                pass
            except (RouterError, AdapterError) as error:
                backends.audit.denied(scope, principal, error)
                await client.fail(answer_of(error))
            except asyncio.CancelledError:  # by the server, at the drain timeout
                await client.fail(answer_of(Stopping("the router is stopping")))
            except Exception as error:  # the edge of this request
                log.exception("request failed", extra={"fields": {"request_id": request.request_id}})
                await client.fail(answer_of(error))
            finally:
                self._recorder.record(request)

    async def _serve(self, request: Request, client: ClientAnswer, take: Callable[[int], None], receive: Any) -> None:
        backends, config = self._backends, self._backends.config
        with backends.quotas.admission(request.principal) as admission:
            try:
                with request.span.child("admission"):
                    body = await read_body(
                        request.headers,
                        receive,
                        max_bytes=config.max_body_bytes,
                        timeout_s=config.body_timeout_s,
                        on_bytes=take,
                        arrived=client.connection.arrived_body,
                    )
                    validated = await backends.bodies.decode(
                        validate, self._endpoint, body, backends.limits, num_bytes=len(body)
                    )
                    if validated.echoes:  # the answer has them, too, until a slow client has read it
                        take(validated.num_per_prompt * sum([len(memoryview(each)) for each in validated.prompts]))
                    del body  # of which its fields are parts, or, for a response, translations
                request.validated, request.is_streaming = validated, validated.is_streaming
                with request.span.child("resolve"):
                    request.revision = await resolve(
                        validated.model, validated.adapter, backends.model, backends.adapters, request.principal
                    )
                if request.revision is not None and (split := request.revision.split) is not None:
                    request.split_alias = split.alias
                    if gets_newer(split, validated.sticky_key or request.request_id):
                        request.revision = split.newer
                request.adapter_scale = validated.adapter_scale
                request.scaled_id = scaled_id_of(request.revision, request.adapter_scale)
                self._admit(request, admission)
                self._translate(request, client)
                in_turn = self._answer_in_turn(request, client, admission) if admission.is_counted else None
                work = in_turn or self._answer(request, client)
                await while_connected(client.connection, work, lambda: client.is_complete)
            except ClientGone:
                request.status = CLIENT_LEFT  # it is settled by that
                raise
            except DeadlineExceeded:  # engines may have generated for all that time
                raise
            except (RouterError, AdapterError) as error:
                request.status = request.status or error.http_status
                raise
            finally:
                admission.settle(*self._used_tokens.of(request))

    def _admit(self, request: Request, admission: Admission) -> None:
        """Count the request against its quotas. Raises QuotaExceeded, under headers that name the adapter."""
        validated, revision, headers = request.validated, request.revision, request.answer_headers
        if revision is not None:
            request.adapter, request.revision_id = revision.full_name, revision.revision_id
            headers["x-prelude-adapter"], headers["x-prelude-revision"] = request.adapter, request.revision_id
            if (trained := revision.manifest.trained_positions) is not None:  # and it is applied to others
                headers["x-prelude-trained-positions"] = trained
        if admission.is_counted:
            prompt_tokens = self._backends.prompts.estimate(validated.fields, validated.prompts)
            request.most_output_tokens = validated.most_output_tokens
            admission.take(Use.of(validated, prompt_tokens))
            headers |= admission.headers()
        is_asked = request.headers.get(b"x-prelude-debug") == b"placement"
        may_see = self._backends.config.debug_header and request.principal.crosses_tenants  # it names workers
        request.shows_placement = is_asked and may_see

    def _translate(self, request: Request, client: ClientAnswer) -> None:
        """Choose the prefix cache's namespace, and how the engine's answer becomes the client's."""
        revision, validated, fingerprint = request.revision, request.validated, self._backends.fingerprint
        is_shared = self._backends.config.share_base_prefixes if revision is None else revision.shares_prefixes
        directory = self._backends.adapters.directory
        request.namespace = directory.cache_namespace(request.principal, is_shared=is_shared)
        if revision is not None:
            fingerprint = f"{fingerprint}-{revision.revision_id.removeprefix('sha256:')[:12]}"
            if request.scaled_id != revision.revision_id:
                fingerprint += f"x{request.adapter_scale:g}"
        if validated.repeated is None:
            request.translator = _rewriter(fingerprint, self._backends.model, validated.model, is_shared)
        else:
            response = Response(validated.repeated, request.request_id, model=validated.model, fingerprint=fingerprint)
            request.translator = translator = ResponseTranslator(response, hides_cached_tokens=is_shared)
            client.error_event = translator.failed
        if request.span.is_recorded:
            request.translator = FinishReasons(request.translator)

    # ---- place, ensure, relay ---------------------------------------------------------------------------------------

    async def _answer_in_turn(self, request: Request, client: ClientAnswer, admission: Admission) -> None:
        with await admission.turn() as turn:
            request.on_placed = None if turn is None else turn.placed
            await self._answer(request, client)

    async def _answer(self, request: Request, client: ClientAnswer) -> None:
        """Answer the client. Raises RouterError, before anything is sent or in the middle of a stream."""
        validated, engines, tenant = request.validated, self._backends.engines, request.principal.confined_to
        num_sequences = validated.num_choices
        num_connections = num_sequences * (2 if validated.generates and self._backends.fleet.state.decodes else 1)
        try:
            with engines.room.held(tenant, num_connections):
                if not validated.is_streaming:
                    await self._answer_whole(request, client)
                elif num_sequences == 1:
                    await self._stream_one(request, client)
                else:
                    await self._stream_several(request, client)
        finally:  # also of a client that leaves in between
            if validated.is_streaming:
                request.sum_usages()

    async def _begin(self, run: SequenceRun) -> bytes:
        """The first events, or the whole answer, of the first attempt that succeeds. Raises RouterError."""
        placement = await run.place()
        while True:
            try:
                run.reserve(placement)
                if run.revision_id is not None:
                    await run.ensure_adapter(run.revision_id)
                return await run.call_engines()
            except (AdapterRefused, AttemptError) as error:
                placement = await run.place_after(error, placement)

    async def _stream_one(self, request: Request, client: ClientAnswer) -> None:
        """The hot path of most tokens: it parses no event."""
        translate = request.translator.on_events
        write = client.writer(translate)
        async with SequenceRun(self._backends, request, next(request.validated.sequences())) as run:
            first = await self._begin(run)
            last = await run.relay(first, write, client)
            await client.end_stream(last, translate)

    async def _stream_several(self, request: Request, client: ClientAnswer) -> None:
        """Merge the streams of all sequences. One that fails ends them all."""
        streams = ChoiceStreams(
            answer_id=_answer_id(request),
            num_per_prompt=request.validated.num_per_prompt,
            includes_usage=request.validated.includes_usage,
        )

        write_merged = client.writer(request.translator.on_events)

        async def stream(sequence: Sequence) -> None:
            def write(events: bytes) -> None:
                if merged := streams.events(sequence.index, events):
                    write_merged(merged)

            async with SequenceRun(self._backends, request, sequence) as run:
                first = await self._begin(run)
                write(await run.relay(first, write, client))

        await _gather(stream, request.validated.sequences())
        await client.end_stream(streams.end(), request.translator.on_events)

    async def _answer_whole(self, request: Request, client: ClientAnswer) -> None:
        async def answer_of_one(sequence: Sequence) -> bytes:
            async with SequenceRun(self._backends, request, sequence) as run:
                return await run.completed(await self._begin(run))

        validated, output = request.validated, request.validated.prefill_output
        if output is None and validated.num_choices == 1:
            answer = await answer_of_one(next(validated.sequences()))
        else:
            answers, answer_id = await _gather(answer_of_one, validated.sequences()), _answer_id(request)
            if output is not None:
                answer = output.merge(answers, answer_id=answer_id, model=self._backends.model)
            else:
                answer = await merged_answer(answers, answer_id=answer_id, num_per_prompt=validated.num_per_prompt)
        request.num_prompt_tokens, request.num_completion_tokens = answer_counts(answer)
        await client.whole(200, request.translator.on_answer(answer), _JSON)


async def _gather(run: Callable[[Sequence], Coroutine[Any, Any, Any]], sequences: Iterable[Sequence]) -> list:
    """All results in order. The first failure cancels the others and is raised without its group.

    Yields to other requests between two starts, since starting 128 at once would block the event loop for 0.1 s.
    """
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for sequence in sequences:
                tasks.append(group.create_task(run(sequence)))
                await asyncio.sleep(0)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def _answer_id(request: Request) -> str:
    """The id of an answer that several sequences share."""
    return f"{request.endpoint.id_prefix}{request.request_id}"


@lru_cache(maxsize=1024)
def _rewriter(fingerprint: str, engine_model: str, requested_model: str, hides_cached_tokens: bool) -> AnswerRewriter:
    """The AnswerRewriter for a target. It is stateless, so all requests for the target share it."""
    return AnswerRewriter(
        fingerprint,
        engine_model=engine_model,
        requested_model=requested_model,
        hides_cached_tokens=hides_cached_tokens,
    )
