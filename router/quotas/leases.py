"""A router's side of shared limits: computes what to ask for and applies the answers. Knows no database."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.catalog.quota_leases import GaugeAsk, Leases, RateAsk
from router.quotas.bucket import Bucket, Gauge
from router.quotas.budget import SEQUENCES, Budget

_STOCK = 32  # parts of its share of a bucket, of which an idle router keeps one
_AHEAD = 1.5  # of what was wanted since the last lease
_LOOK_S = 1.0  # between two looks at a pool from which nothing is needed: others use it
_FORGET_S = 60.0  # after which an unused budget is given back
_MOST = 250  # budgets that are looked at for one renewal: a thousand hold the event loop up for long, and the database


def share_out(budget: Budget, num_sharing: int) -> None:
    """Start with a small part of each limit, of which other routers do not know yet."""
    for bucket in budget.buckets.values():
        bucket.local_rate = 0.0
        bucket.level = bucket.advance = bucket.capacity / (_STOCK * num_sharing)
        bucket.elsewhere, bucket.part = bucket.capacity - bucket.level, 1 / num_sharing
    _allow_equal_part(budget, num_sharing)


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests for leases, and the limits that the answers belong to."""

    rates: Sequence[tuple[Bucket, RateAsk]]
    gauges: Sequence[tuple[Gauge, GaugeAsk]]
    unused: Sequence[str]  # subjects that are given back, and may be forgotten then

    def __bool__(self) -> bool:
        return bool(self.rates or self.gauges)


def ask(budgets: dict[str, Budget | None], num_sharing: int, now: float, *, gives_back: bool = False) -> Asked:
    """The requests for leases of budgets that have changed, and of others once a second, in turns.

    With `gives_back`, everything is given back.
    """
    rates, gauges, unused = [], [], []
    found = [(name, each) for name, each in budgets.items() if each is not None]
    if not gives_back:
        found = [each for each in found if each[1].has_changed or now - each[1].looked_at >= _LOOK_S][:_MOST]
    for subject, budget in found:
        budgets[subject] = budgets.pop(subject)  # the last in turn
        is_unused = gives_back or budget.is_unused_since(now - _FORGET_S)
        if is_due := now - budget.looked_at >= _LOOK_S:
            budget.looked_at = now
        budget.has_changed = budget.num_running > 0
        for name, bucket in budget.buckets.items():
            floor = bucket.capacity / (_STOCK * num_sharing)
            bucket.refill(now)
            wanted = 0.0 if is_unused else min(bucket.capacity, max(floor, _AHEAD * bucket.wanted))
            if has_changed := bool(bucket.wanted or bucket.level != wanted or bucket.advance):
                budget.has_changed = True
            if has_changed or is_due:
                key = f"{subject}/{name}"
                asked = RateAsk(key, bucket.rate, bucket.capacity, bucket.level, wanted, bucket.advance)
                rates.append((bucket, asked))
        if (gauge := budget.sequences) is not None:
            most = gauge.wanted(now)
            budget.has_changed |= most > 0
            # Also an idle router with the whole limit asks: others may want it.
            if most or is_unused or gauge.allowed < gauge.limit or num_sharing > 1:
                key = f"{subject}/{SEQUENCES}"
                gauges.append((gauge, GaugeAsk(key, gauge.limit, gauge.used, most, gauge.unit, is_unused)))
        if is_unused:
            unused.append(subject)
    for bucket, _ in rates:
        bucket.wanted = bucket.advance = 0.0
    return Asked(rates, gauges, unused)


def answered(asked: Asked, leases: Leases) -> None:
    """Apply the answers. Use since the request stays counted."""
    for (bucket, _), (granted, level) in zip(asked.rates, leases.rates, strict=True):
        bucket.local_rate = 0.0
        bucket.level += granted
        bucket.elsewhere, bucket.part = max(0.0, level), 1 / leases.num_members
    for (gauge, _), allowed in zip(asked.gauges, leases.gauges, strict=True):
        gauge.allowed = allowed


def not_answered(asked: Asked) -> None:
    """The requests did not arrive: repeat them next time."""
    for bucket, each in asked.rates:
        bucket.advance += each.advance
        bucket.wanted = max(bucket.wanted, each.wanted / _AHEAD)


def alone(budgets: Iterable[Budget | None], num_sharing: int) -> None:
    """Use an equal part of every limit, while the database does not answer."""
    for budget in budgets:
        if budget is None:
            continue
        for bucket in budget.buckets.values():
            bucket.local_rate = bucket.rate / num_sharing
            bucket.elsewhere = 0.0
        _allow_equal_part(budget, num_sharing)


def _allow_equal_part(budget: Budget, num_sharing: int) -> None:
    if (gauge := budget.sequences) is not None:
        gauge.allowed = max(1.0, gauge.limit / num_sharing)
