"""Which revision of a split alias answers a request, and whether the newer one is worse.

The same key gets the same revision, at every router and after restarts: a hash of alias and key is a point from 0 to
99; the newer revision answers those below its percent. So a share that grows adds keys and moves no other. The alias is
hashed, too: else the same keys would get the news of every adapter.

    percent of the newer     0    5        20                                       100
    5                        |new |older                                              |
    20                       |new          |older                                     |
"""

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from threading import Lock

from prometheus_client import Counter, Histogram

from adapters.catalog.records import AdapterRevision, AliasSplit
from adapters.errors import AdapterNotFound

_NUM_POINTS = 100  # shares are whole percents
_MAX_REVISIONS = 200  # whose series exist at a time
_MAX_OF_TENANT = 20  # of these: tenants split aliases at will


def gets_newer(split: AliasSplit, key: str) -> bool:
    """Whether the newer of the two revisions answers a key.

    `key`: who or what must stay at one revision (`ValidatedRequest.sticky_key`), or anything random.
    """
    digest = blake2b(f"{split.alias}\0{key}".encode(), digest_size=8).digest()  # an alias has no NUL
    return int.from_bytes(digest) % _NUM_POINTS < split.target.percent


class SplitMetrics:
    """Metrics of requests to split aliases alone. Their series end with the split. For any number of threads."""

    def __init__(
        self,
        counter: Callable[..., Counter],
        histogram: Callable[..., Histogram],
        *,
        first_token_buckets: tuple[float, ...],
        per_token_buckets: tuple[float, ...],
    ) -> None:
        labels = ("adapter", "revision")
        self._requests = counter(
            "prelude_router_split_requests_total",
            "Requests to split aliases, by revision, and by HTTP status or the code of the error that ended a stream. "
            f"At most {_MAX_OF_TENANT} revisions of a tenant, {_MAX_REVISIONS} in all.",
            (*labels, "status"),
        )
        self._first_token = histogram(
            "prelude_router_split_time_to_first_token_seconds",
            "prelude_router_time_to_first_token_seconds of requests to split aliases.",
            labels,
            buckets=first_token_buckets,
        )
        self._per_token = histogram(
            "prelude_router_split_time_per_output_token_seconds",
            "gen_ai_server_time_per_output_token_seconds of requests to split aliases.",
            labels,
            buckets=per_token_buckets,
        )
        # (adapter's full name, revision) -> (tenant, alias through which the latest request got it)
        self._splits: dict[tuple[str, str], tuple[str, str]] = {}
        self._lock = Lock()

    def record(
        self, alias: str, revision: AdapterRevision, status: str, first_token_s: float | None, per_token_s: float | None
    ) -> None:
        """Record a request that has ended. None: unknown, as for an answer that was not streamed."""
        labels = revision.full_name, f"r{revision.number}"
        with self._lock:
            if labels not in self._splits and not self._takes_one_of(revision.tenant):
                return
            self._splits[labels] = revision.tenant, alias
            self._requests.labels(*labels, status).inc()
            if first_token_s is not None:
                self._first_token.labels(*labels).observe(first_token_s)
            if per_token_s is not None:
                self._per_token.labels(*labels).observe(per_token_s)

    def _takes_one_of(self, tenant: str) -> bool:
        num_of_tenant = sum(1 for each, _ in self._splits.values() if each == tenant)
        return len(self._splits) < _MAX_REVISIONS and num_of_tenant < _MAX_OF_TENANT

    def end_others(self, resolve: Callable[[str], AdapterRevision]) -> None:
        """Remove the series of splits that have ended. `resolve` raises AdapterNotFound; all its errors but this pass.

        Call it again and again, since requests in flight outlast a split.
        """
        with self._lock:
            splits = tuple(self._splits.items())
        for labels, (_, alias) in splits:
            if labels not in _revisions_of(alias, resolve):
                with self._lock:
                    del self._splits[labels]
                    for metric in (self._requests, self._first_token, self._per_token):
                        metric.remove_by_labels(dict(zip(("adapter", "revision"), labels, strict=True)))


def _revisions_of(alias: str, resolve: Callable[[str], AdapterRevision]) -> set[tuple[str, str]]:
    """Those over which the alias is split; none if it is not."""
    with suppress(AdapterNotFound):
        older = resolve(alias)
        if older.split is not None:
            return {(each.full_name, f"r{each.number}") for each in (older, older.split.newer)}
    return set()
