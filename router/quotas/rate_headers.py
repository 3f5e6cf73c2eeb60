"""OpenAI's `x-ratelimit-…` headers."""

from collections.abc import Iterable

from router.quotas.bucket import Bucket
from router.quotas.budget import OUTPUT, PROMPT, REQUESTS, Budget


def rate_headers(budgets: Iterable[Budget]) -> dict[str, str]:
    """For requests and for tokens: the values of the limit with the smallest share left."""
    requests: Bucket | None = None
    tokens: Bucket | None = None
    requests_left = tokens_left = 2.0  # shares
    for budget in budgets:
        for name, bucket in budget.buckets.items():
            if name == REQUESTS:
                if (left := bucket.remaining / bucket.capacity) < requests_left:
                    requests, requests_left = bucket, left
            elif name in (PROMPT, OUTPUT) and (left := bucket.remaining / bucket.capacity) < tokens_left:
                tokens, tokens_left = bucket, left
    headers: dict[str, str] = {}
    for kind, scarcest in (("requests", requests), ("tokens", tokens)):
        if scarcest is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(int(scarcest.capacity))
            headers[f"x-ratelimit-remaining-{kind}"] = str(int(scarcest.remaining))
            headers[f"x-ratelimit-reset-{kind}"] = duration(scarcest.reset_s)
    return headers


def duration(seconds: float) -> str:
    """A duration in OpenAI's format: 17ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"
