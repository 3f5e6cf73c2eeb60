"""All limits of one subject: a tenant, a key, or a tenant's changes of adapters."""

from dataclasses import dataclass
from typing import Self

from cluster.config.quotas import TenantQuota, UseLimits
from router.protocol.field_values import TYPICAL_ANSWER_TOKENS, answer_limit
from router.protocol.validation import ValidatedRequest
from router.quotas.bucket import Bucket, Gauge

REQUESTS, PROMPT, OUTPUT = "requests", "prompt_tokens", "output_tokens"
PUSHES, CHANGES = "pushes", "changes"
_OF_REQUESTS = (REQUESTS, PUSHES, CHANGES)  # each counts one per request, whatever the request uses
SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class Use:
    """What a request will use, estimated before it runs."""

    prompt_tokens: int = 0
    output_tokens: int = 0  # at most, as far as it says
    sequences: int = 0

    @classmethod
    def of(cls, validated: ValidatedRequest, prompt_tokens: int) -> Self:
        """`prompt_tokens`: the estimate for all prompts of the request."""
        limit = answer_limit(validated.fields)
        each = TYPICAL_ANSWER_TOKENS if limit is None else limit
        return cls(prompt_tokens, validated.num_choices * each if validated.generates else 0, validated.num_choices)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A limit that a request would exceed."""

    limit: str
    most: float
    asked: float
    wait_s: float | None  # None: until something in use has ended

    @property
    def is_for_ever(self) -> bool:
        """True if waiting does not help. (At a rate limit it does, even for more than the bucket holds.)"""
        return self.wait_s is None and self.asked > self.most


class Budget:
    """The configured limits of a subject, and what is left of them at this router."""

    __slots__ = ("buckets", "has_changed", "label", "looked_at", "num_running", "sequences", "used_at")

    def __init__(self, label: str, limits: UseLimits, now: float, quota: TenantQuota | None = None) -> None:
        """`label`: for messages, such as "tenant acme". `quota`: a tenant's, whose limits of changes count, too."""
        self.label = label
        self.used_at = self.looked_at = now  # `looked_at`: when leases of all its limits were asked for
        self.has_changed = True  # since leases were asked for
        self.num_running = 0  # requests that will settle, or give back what they use
        rates = {
            REQUESTS: (limits.requests_per_s, 1),
            PROMPT: (limits.prompt_tokens_per_min, 60),
            OUTPUT: (limits.output_tokens_per_min, 60),
            PUSHES: (None if quota is None else quota.pushes_per_hour, 3600),
            CHANGES: (None if quota is None else quota.changes_per_min, 60),
        }
        # So much at once after a pause: a second's requests, a minute's tokens.
        self.buckets = {
            name: Bucket(most / seconds, max(1.0, most), now)
            for name, (most, seconds) in rates.items()
            if most is not None
        }
        self.sequences = None if limits.sequences is None else Gauge(limits.sequences)

    def refill(self, now: float) -> None:
        """Bring every limit up to date."""
        self.used_at, self.has_changed = now, True
        for bucket in self.buckets.values():
            bucket.refill(now)

    def never(self, use: Use) -> Shortage | None:
        """The limit that the request would exceed even if nothing else were in use; None if there is none."""
        if self.sequences is None or use.sequences <= self.sequences.limit:
            return None
        return Shortage(SEQUENCES, self.sequences.limit, use.sequences, None)

    def shortage(self, use: Use) -> Shortage | None:
        """The limit with the longest wait; None if all permit the use. Takes nothing. Call `refill` before."""
        worst, longest_s = None, 0.0
        for name, bucket in self.buckets.items():
            if name in _OF_REQUESTS or not (amount := getattr(use, name)):
                continue
            bucket.wanted += amount
            if (wait_s := bucket.wait_s) > longest_s:
                worst, longest_s = Shortage(name, bucket.capacity, amount, wait_s), wait_s
        if self.sequences is not None and not self.sequences.can_take(use.sequences) and worst is None:
            worst = Shortage(SEQUENCES, self.sequences.limit, use.sequences, None)
        return worst

    def take(self, use: Use) -> None:
        """Admit a use that `shortage` permits."""
        for name, bucket in self.buckets.items():
            if name not in _OF_REQUESTS:
                bucket.take(_reserved(name, bucket, use))
        if self.sequences is not None:
            self.sequences.take(use.sequences)

    def request_shortage(self, name: str = REQUESTS) -> Shortage | None:
        """As `shortage`, for the limit of requests, PUSHES or CHANGES."""
        if (bucket := self.buckets.get(name)) is None:
            return None
        bucket.wanted += 1
        wait_s = bucket.wait_s
        return Shortage(name, bucket.rate if name == REQUESTS else bucket.capacity, 1, wait_s) if wait_s else None

    def take_request(self, name: str = REQUESTS) -> None:
        if (bucket := self.buckets.get(name)) is not None:
            bucket.take(1)

    def settle(self, use: Use, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Replace an ended request's estimates by its actual use. None: unknown, so the estimate stands."""
        actual = {PROMPT: prompt_tokens, OUTPUT: output_tokens}
        for name, tokens in actual.items():
            if tokens is not None and (bucket := self.buckets.get(name)) is not None:
                bucket.take(tokens - _reserved(name, bucket, use))
        if self.sequences is not None:
            self.sequences.take(-use.sequences)

    def end(self, now: float) -> None:
        """A running request has ended."""
        self.num_running -= 1
        self.used_at, self.has_changed = now, True

    @property
    def is_idle(self) -> bool:
        """Whether the budget is as good as new, so that it can be forgotten. Call `refill` before."""
        return not self.num_running and all(each.is_idle for each in self.buckets.values())

    def is_unused_since(self, at: float) -> bool:
        """Whether no request ran since then and there is no debt, so that leases may be given back."""
        return not self.num_running and self.used_at < at and all(each.level >= 0 for each in self.buckets.values())


def _reserved(name: str, bucket: Bucket, use: Use) -> float:
    """The amount that a request takes on admission.

    At most a full bucket of output tokens: few requests generate all that they ask for.
    """
    amount = getattr(use, name)
    return min(amount, bucket.capacity) if name == OUTPUT else amount
