"""What the span of a request that has ended says of it, in OpenTelemetry's names where there are some.

HTTP's conventions, and those for generative AI, version 0.1.0. No text that the client wrote: names are resolved ones.
"""

import re
import socket
from typing import Any

from adapters.catalog.usage import Counts
from process.tracing.span import Attributes
from router.collectors import OPERATIONS, PROVIDER
from router.generation.backends import Backends
from router.generation.request import AnswerTranslator, Request
from router.protocol.field_values import answer_limit

_NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
_ANY_ADDRESS = ("0.0.0.0", "::")
# Unescaped quotes, so no generated text can contain it.
_FINISH_REASON = re.compile(rb'"finish_reason":"(\w{1,32})"')


class FinishReasons:
    """Notes why sequences end, while a traced request's answer is translated: it searches every event."""

    def __init__(self, translator: AnswerTranslator) -> None:
        self.found: list[str] = []  # in the order in which sequences have ended
        self._translator = translator

    def on_events(self, events: bytes) -> bytes:
        self._note(events)
        return self._translator.on_events(events)

    def on_answer(self, answer: bytes) -> bytes:
        self._note(answer)
        return self._translator.on_answer(answer)

    def _note(self, data: bytes) -> None:
        self.found += [each.decode() for each in _FINISH_REASON.findall(data)]


def describe(request: Request, given: Counts | None, backends: Backends) -> None:
    """Give the span of a finished request its attributes."""
    span, attributes = request.span, _http(request, backends) | _prelude(request) | _gen_ai(request, given, backends)
    span.set({name: value for name, value in attributes.items() if value is not None})
    if request.stream_error is not None:
        span.fail(request.stream_error)
    elif request.status is not None and request.status >= 500:
        span.fail(str(request.status))


def _http(request: Request, backends: Backends) -> dict[str, Any]:
    host = backends.config.host
    return {
        "http.request.method": "POST",
        "http.route": request.endpoint.value,
        "http.response.status_code": request.status,
        "server.address": socket.gethostname() if host in _ANY_ADDRESS else host,
        "server.port": backends.config.port,
    }


def _prelude(request: Request) -> dict[str, Any]:
    return {
        "prelude.request_id": request.request_id,
        "prelude.adapter": request.adapter,
        "prelude.revision": request.revision_id,
        "prelude.sequences": len(request.sequences),
        "prelude.attempts": sum(s.num_attempts for s in request.sequences),
    }


def _gen_ai(request: Request, given: Counts | None, backends: Backends) -> dict[str, Any]:
    translator = getattr(request, "translator", None)
    is_resolved = translator is not None
    reasons = translator.found if isinstance(translator, FinishReasons) else []
    found: dict[str, Any] = {
        "operation.name": OPERATIONS[request.endpoint.label],
        "provider.name": PROVIDER,
        "request.model": (request.adapter or backends.model) if is_resolved else None,
        "response.model": backends.model if request.status == 200 else None,
        "response.finish_reasons": reasons or None,
        "response.time_to_first_chunk": request.first_byte_s,
        "usage.input_tokens": request.num_prompt_tokens,
        "usage.output_tokens": request.num_completion_tokens,
        "usage.cache_read.input_tokens": (given and given.cached_tokens) or None,
    }
    if is_resolved:
        found |= {f"request.{name}": value for name, value in _asked(request).items()}
    return {f"gen_ai.{name}": value for name, value in found.items()}


def _asked(request: Request) -> Attributes:
    """The numbers of a validated request."""
    validated = request.validated
    fields = validated.fields
    asked: dict[str, Any] = {name: float(bytes(fields[name])) for name in _NUMBERS if name in fields}
    asked |= {"seed": validated.seed, "max_tokens": answer_limit(fields), "stream": request.is_streaming}
    if "top_k" in fields:
        asked["top_k"] = int(bytes(fields["top_k"]))
    if validated.num_per_prompt != 1:
        asked["choice.count"] = validated.num_per_prompt
    return asked
