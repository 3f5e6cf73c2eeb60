"""How many tokens a request has used, for quotas and fair queueing; an estimate if no engine has reported it."""

from __future__ import annotations

from router.generation.request_state import RequestState

_MIN_TOKENS = 16  # of a stream that shows how fast engines generate
_MIN_S = 0.1
_FASTEST = 1000.0  # tokens/s of one sequence
_WEIGHT_OF_FASTER, _WEIGHT_OF_SLOWER = 0.3, 0.03  # slow readers must not make it look slow


class UsedTokens:
    """Tokens of ended requests. Learns the generation speed from streams with counts, to estimate streams without."""

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None  # of one sequence

    def of(self, request: RequestState, status: int | None) -> tuple[int | None, int | None]:
        """Tokens of the prompts and of the output, None if unknown. `status`: the answer's, if there is one."""
        if not any(sequence.num_attempts for sequence in request.sequences):
            return 0, 0
        output = request.num_completion_tokens
        if output is None and request.num_events:  # a stream that has not come to its usage event
            output = self._estimate(request)
        elif output is None:
            output = 0 if status is not None and status >= 400 else None
        elif request.first_byte_s is not None:
            self._observe(output / len(request.sequences), request.age_s - request.first_byte_s)
        return request.num_prompt_tokens, output

    def _observe(self, num_tokens: float, duration_s: float) -> None:
        if num_tokens < _MIN_TOKENS or duration_s < _MIN_S:
            return
        found, known = min(num_tokens / duration_s, _FASTEST), self._tokens_per_s
        if known is None:
            self._tokens_per_s = found
        else:
            self._tokens_per_s = known + (_WEIGHT_OF_FASTER if found > known else _WEIGHT_OF_SLOWER) * (found - known)

    def _estimate(self, request: RequestState) -> int:
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
