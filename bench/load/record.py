"""The record of one request that was sent, or should have been."""

import msgspec

# The kinds of failure. Their counts are shown; their times are in no latency.
UNREACHABLE = "unreachable"  # no connection: refused, no such host, closed before an answer began
ERROR_ANSWER = "error_answer"  # a status other than 200
ERROR_EVENT = "error_event"  # an error inside of a stream that began with 200
TRUNCATED = "truncated"  # a stream that ended before its end, or without a token
MALFORMED = "malformed"  # 200, and no event stream
TIMED_OUT = "timed_out"
NOT_SENT = "not_sent"  # an earlier turn of the session failed
ERROR_KINDS = (UNREACHABLE, ERROR_ANSWER, ERROR_EVENT, TRUNCATED, MALFORMED, TIMED_OUT, NOT_SENT)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Times are seconds since the start of the load."""

    session: int
    turn: int
    intended_s: float  # when it should have been sent: the origin of every latency
    sent_s: float
    end_s: float
    adapter: str | None = None  # None: the base model
    token_s: tuple[float, ...] = ()  # of each event that had tokens
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, as the server says
    output_tokens: int = 0
    max_tokens: int = 0
    error: str | None = None  # one of ERROR_KINDS
    status: int | None = None
    detail: str = ""  # of an error: its code or message, shortened

    @property
    def ttft_s(self) -> float:
        """From the intended time to the first token. Only for records without an error."""
        return self.token_s[0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        """From the intended time to the end of the answer."""
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.output_tokens < 2 or not self.token_s:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between events with tokens. An engine that sends several tokens in one event has fewer of them."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]
