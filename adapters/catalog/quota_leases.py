"""How routers divide what is left of a limit: the arithmetic of leases, without a database or a clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateAsk:
    """What one router asks of a shared rate limit."""

    subject: str
    rate: float  # per second
    capacity: float
    left: float  # of what it has leased; negative: it has used more
    wanted: float  # that it would have
    advance: float = 0.0  # of `left`, what it has not leased yet


@dataclass(frozen=True, slots=True)
class GaugeAsk:
    """What one router asks of a shared concurrency limit."""

    subject: str
    limit: float
    used: float
    wanted: float
    unit: float = 0.0  # the smallest request that was refused lately
    gives_back: bool = False  # keeps nothing


@dataclass(frozen=True, slots=True)
class Leases:
    """The answers, in the order of the asks."""

    num_members: int  # routers that share
    rates: Sequence[tuple[float, float]]  # granted now (negative: given back), and left for all
    gauges: Sequence[float]  # that may be in use at this router


@dataclass(frozen=True, slots=True)
class Pool:
    """The unleased part of a rate limit's bucket, as of a time."""

    level: float
    at: float  # seconds


def lease_rate(pool: Pool | None, ask: RateAsk, now: float, num_members: int) -> tuple[Pool, float]:
    """The pool afterwards, and what is granted. None: a full pool.

    One ask gets its part of the level only, so that a router which asks first does not get all. Nothing is lost or
    made: the pool and all leases together never hold more than the capacity and what the rate has added.
    """
    level = ask.capacity
    if pool is not None:
        level = min(ask.capacity, pool.level + max(0.0, now - pool.at) * ask.rate)
    level -= ask.advance
    missing = ask.wanted - ask.left
    granted = missing if missing < 0 else min(missing, max(0.0, level) / num_members)
    return Pool(min(ask.capacity, level - granted), now), granted


def lease_gauge(ask: GaugeAsk, others: Sequence[tuple[float, float]]) -> float:
    """How much this router may have in use: its fair part by what all want, of what the others do not hold.

    `others`: what each of them wants and holds. Parts are whole: who asks first gets what a division leaves over.
    """
    if ask.gives_back:
        return 0.0
    free = max(0, math.floor(ask.limit - sum(held for _, held in others)))
    part, spare = _fair_part(ask.wanted, [wanted for wanted, _ in others], ask.limit)
    if part < ask.wanted:
        if part > ask.used:  # so much that requests fit: the last one's whole, or nothing of it, for another router
            unit = max(1.0, ask.unit)
            num_more = (part - ask.used) / unit
            most = ask.used + math.ceil(num_more) * unit
            part = most if most <= free else ask.used + math.floor(num_more) * unit
        return min(part, free)
    unmet = sum(max(0.0, wanted - held) for wanted, held in others)
    return min(part + max(math.floor(spare), min(math.ceil(spare), free - part - unmet)), free)


def _fair_part(wanted: float, others: Sequence[float], limit: float) -> tuple[float, float]:
    """The max-min fair share, and an equal part of the unclaimed rest, so that it can be used at once."""
    left, num_left = limit, len(others) + 1
    for each in sorted([wanted, *others]):
        part = left / num_left
        if each > part:
            return min(wanted, part), 0.0
        left -= each
        num_left -= 1
    return wanted, left / (len(others) + 1)
