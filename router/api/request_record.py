"""What is written of a request that has ended: its metrics, its log line, its span, and the tokens that it has used.

Tokens twice: those that quotas take for it, which may be more than it got, and those that its client was given.
"""

import logging
from functools import cache
from typing import Any

from adapters.catalog.usage import Counts, Subject
from cluster.config.router import SloConfig
from process.log import info
from router.api.request_span import describe
from router.generation.backends import Backends
from router.generation.request import CLIENT_LEFT, Request
from router.identity.access import SHARED_NAMESPACE
from router.placement.request import PromptMeter
from router.protocol.field_values import TYPICAL_ANSWER_TOKENS
from router.protocol.validation import Endpoint
from router.quotas.usage import MAX_ROWS

_MIN_TOKENS = 16  # of a stream that shows how fast engines generate
_MIN_S = 0.1
_FASTEST = 1000.0  # tokens/s of one sequence
_WEIGHT_OF_FASTER, _WEIGHT_OF_SLOWER = 0.3, 0.03  # slow readers must not make it look slow

log = logging.getLogger(__name__)


class RequestRecorder:
    """Records the requests of one endpoint. Writes no prompt and no header."""

    def __init__(self, endpoint: Endpoint, backends: Backends) -> None:
        self._backends = backends
        self._metrics = backends.metrics
        self._slo = backends.config.slo
        # A metric's own `labels` costs several times what counting does. Label values are few.
        self._labelled = cache(lambda metric, *values: metric.labels(endpoint.label, *values))

    def record(self, request: Request) -> None:
        """Write the log line, the metrics and the usage of a finished request."""
        metrics, labelled = self._metrics, self._labelled
        duration_s = request.age_s
        labelled(metrics.requests, str(request.status)).inc()
        exemplar = {"trace_id": str(request.span.trace_id)} if request.span.is_recorded else None
        labelled(metrics.duration).observe(duration_s, exemplar)
        per_token_s = None
        if request.first_byte_s is not None:
            labelled(metrics.first_byte).observe(request.first_byte_s, exemplar)
        if request.stream_error is not None:
            labelled(metrics.stream_errors, request.stream_error).inc()
        elif request.status == 200:
            per_token_s = self._record_times(request, duration_s, exemplar)
        if request.adapter is not None:
            metrics.busiest_adapters.count(request.adapter)
        if request.split_alias is not None and request.revision is not None:
            outcome = request.stream_error or str(request.status)
            metrics.splits.record(request.split_alias, request.revision, outcome, request.first_byte_s, per_token_s)
        given = given_to_client(request, self._backends.prompts)
        if request.span.is_recorded:
            describe(request, given, self._backends)
        if given is not None:
            self._count(request, given)
        _log(request, given, duration_s)

    def _count(self, request: Request, given: Counts) -> None:
        """Add what the client was given to what it is billed for."""
        backends, principal, usage = self._backends, request.principal, self._backends.usage
        tenant = backends.adapters.directory.lasting_name(principal)
        adapter, revision_id = request.adapter or "", request.revision_id or ""
        hour = int(usage.clock() // 3600)
        subject = Subject(hour, tenant, principal.key_id or "", adapter, revision_id, backends.model)
        if subject in usage.rows or len(usage.rows) < MAX_ROWS:
            usage.rows[subject].add(given)
        else:
            self._metrics.usage_lost.inc()

    def _record_times(self, request: Request, duration_s: float, exemplar: dict[str, str] | None) -> float | None:
        """Record how fast a complete answer was. Returns the time per token after the first of a stream."""
        metrics, labelled = self._metrics, self._labelled
        first_s = request.first_byte_s
        # [DONE] is an event, too.
        num_events = (request.num_completion_tokens or 1) if first_s is None else request.num_events - 1
        num_sequences = max(1, len(request.sequences))
        # Of a busy engine, an event has several tokens.
        num_later = max(num_events, request.num_completion_tokens or 0) // num_sequences - 1
        met = keeps_slo(self._slo, num_later, first_s, duration_s)
        labelled(metrics.slo_requests, "true" if met else "false").inc()
        if num_later <= 0:
            return None
        self._backends.placer.answered(num_later + 1)
        if first_s is None:
            return None
        per_token_s = (duration_s - first_s) / num_later
        labelled(metrics.token_time).observe(per_token_s, exemplar)
        return per_token_s


def keeps_slo(slo: SloConfig, num_later: int, first_event_s: float | None, duration_s: float) -> bool:
    """Whether an answer with so many tokens after the first met `router.slo`. No first event: it was not streamed."""
    rest_s = slo.event_gap_s * max(0, num_later)
    if first_event_s is None:
        return duration_s <= slo.first_token_s + rest_s
    return first_event_s <= slo.first_token_s and duration_s - first_event_s <= rest_s + slo.event_gap_s


def given_to_client(request: Request, prompts: PromptMeter) -> Counts | None:
    """The tokens of an answer, as engines have counted them; None for a request that was refused or got nothing.

    Of a stream that ended before they had counted: a token for each event, and prompts as far as they are known.
    """
    if request.first_byte_s is None and request.status != 200:
        return None
    prompt, output, cached = request.num_prompt_tokens, request.num_completion_tokens, 0
    sequences = request.sequences
    if request.namespace != SHARED_NAMESPACE:  # where the number would say something of other tenants' prompts
        for sequence in sequences:
            cached += sequence.num_cached_tokens
    if prompt is not None and output is not None:
        return Counts(1, 0, prompt, cached, output)
    prompt = sum([sequence.num_prompt_tokens or 0 for sequence in sequences])
    if any(sequence.num_prompt_tokens is None for sequence in sequences):
        prompt = max(prompt, prompts.estimate(request.validated.fields, request.validated.prompts))
    output = sum([sequence.num_completion_tokens or 0 for sequence in sequences])
    num_heads = 0 if request.endpoint is Endpoint.COMPLETIONS else len(sequences)  # a chat's first event has no token
    return Counts(1, 1, prompt, cached, max(output, request.num_events - num_heads))


def _log(request: Request, given: Counts | None, duration_s: float) -> None:
    sequences, first_byte_s = request.sequences, request.first_byte_s
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "client_request_id": request.client_request_id,
        "trace_id": request.span.trace_id,
        "endpoint": request.endpoint.label,
        "principal": request.principal.name,
        "tenant": request.principal.tenant,
        "key": request.principal.key_id,
        "adapter": request.adapter,
        "revision": request.revision_id,
        "adapter_scale": request.adapter_scale,
        "placements": sorted({str(s.placement) for s in sequences if s.placement}),
        "status": request.status,
        "stream_error": request.stream_error,
        "choices": len(sequences),
        "attempts": sum([s.num_attempts for s in sequences]),
        "events": request.num_events or None,
        "prompt_tokens": given and given.prompt_tokens,
        "cached_tokens": given and given.cached_tokens,
        "completion_tokens": given and given.completion_tokens,
        "tokens_are_estimated": bool(given and given.estimated_requests) or None,
        "ensure_adapter_s": round(max([s.ensure_adapter_s for s in sequences], default=0.0), 4),
        "first_byte_s": first_byte_s and round(first_byte_s, 4),
        "duration_s": round(duration_s, 4),
    }
    info(log, "request", {name: value for name, value in fields.items() if value is not None})


class UsedTokens:
    """Tokens of ended requests. Learns the generation speed from streams with counts, to estimate streams without."""

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None  # of one sequence

    def of(self, request: Request) -> tuple[int | None, int | None]:
        """Tokens of the prompts and of the output, None if unknown."""
        if not sum([sequence.num_attempts for sequence in request.sequences]):
            return 0, 0
        output, status = request.num_completion_tokens, request.status or 0
        if output is not None:
            if request.first_byte_s is not None:
                self._observe(output / len(request.sequences), request.age_s - request.first_byte_s)
        elif request.num_events:  # a stream that has not come to its usage event
            output = self._estimate(request)
        elif status == CLIENT_LEFT and not request.is_streaming:
            output = self._of_left(request)
        elif status >= 400:
            output = 0
        return request.num_prompt_tokens, output

    def _observe(self, num_tokens: float, duration_s: float) -> None:
        if num_tokens < _MIN_TOKENS or duration_s < _MIN_S:
            return
        found, known = min(num_tokens / duration_s, _FASTEST), self._tokens_per_s
        if known is None:
            self._tokens_per_s = found
        else:
            self._tokens_per_s = known + (_WEIGHT_OF_FASTER if found > known else _WEIGHT_OF_SLOWER) * (found - known)

    def _of_left(self, request: Request) -> int | None:
        """Of a whole answer whose client has left. None: all that the client has set as a limit."""
        if request.most_output_tokens is not None or request.endpoint not in (Endpoint.CHAT, Endpoint.RESPONSES):
            return None
        each = max(TYPICAL_ANSWER_TOKENS, int(request.age_s * (self._tokens_per_s or 0.0)))
        return each * len(request.sequences)

    def _estimate(self, request: Request) -> int:
        """The number of events seen, or more: engines send no event for some tokens, and parsers hold others back.

        Until the generation speed is known, the estimate is all tokens that the request allows, as for an answer that
        is not streamed.
        """
        counts = [each.num_completion_tokens for each in request.sequences if each.num_attempts]
        num_counted, num_unknown = sum([count or 0 for count in counts]), counts.count(None)
        assert request.first_byte_s is not None
        num_events, most = request.num_events, request.most_output_tokens
        if self._tokens_per_s is not None:
            found = num_counted + num_unknown * (request.age_s - request.first_byte_s) * self._tokens_per_s
            num_tokens = max(num_events, int(found))
        else:
            num_tokens = num_events if most is None else max(num_events, most)
        return num_tokens if most is None else min(num_tokens, most)
