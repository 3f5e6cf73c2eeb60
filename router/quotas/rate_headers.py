"""OpenAI's `x-ratelimit-…` headers."""

from __future__ import annotations

from collections.abc import Iterable

from router.quotas.bucket import Bucket
from router.quotas.budget import OUTPUT, PROMPT, REQUESTS, Budget


def rate_headers(budgets: Iterable[Budget]) -> dict[str, str]:
    """For requests, and for tokens, those of the limit of which the least share is left."""
    headers: dict[str, str] = {}
    requests, tokens = _Scarcest(), _Scarcest()
    for budget in budgets:
        for name, bucket in budget.buckets.items():
            if name == REQUESTS:
                requests.look_at(bucket)
            elif name in (PROMPT, OUTPUT):
                tokens.look_at(bucket)
    for kind, scarcest in (("requests", requests), ("tokens", tokens)):
        if (found := scarcest.bucket) is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(int(found.capacity))
            headers[f"x-ratelimit-remaining-{kind}"] = str(int(found.remaining))
            headers[f"x-ratelimit-reset-{kind}"] = duration(found.reset_s)
    return headers


class _Scarcest:
    __slots__ = ("_share", "bucket")

    def __init__(self) -> None:
        self.bucket: Bucket | None = None
        self._share = 2.0

    def look_at(self, bucket: Bucket) -> None:
        if (share := bucket.remaining / bucket.capacity) < self._share:
            self.bucket, self._share = bucket, share


def duration(seconds: float) -> str:
    """As OpenAI writes it: 17ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"
