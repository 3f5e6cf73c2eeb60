"""Loads, and the order in which they start: requests before prewarms, then tenants in turns, then by arrival."""

import asyncio
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

from adapters.errors import AdapterError
from process.tracing.span import NO_SPAN, Span

_number = attrgetter("number")


@dataclass(eq=False, slots=True)
class Load:
    """The load of one key."""

    key: str
    is_prewarm: bool  # all waiters are prewarms
    number: int  # in order of arrival
    arrived_at: float  # by the loop's clock
    attempts: int = 0
    pending_error: AdapterError | None = None  # why it is blocked or retried; raised to waiters at their deadline
    waiters: dict[asyncio.Future[None], float] = field(default_factory=dict)  # and their deadlines
    tenants: Counter[str] = field(default_factory=Counter)  # of the waiters; like the next one, of `Turns` alone
    is_in_line: bool = False  # it waits for a slot
    task: asyncio.Task[None] | None = None  # of the running attempt
    retry: asyncio.TimerHandle | None = None
    span: Span = NO_SPAN  # of the first waiter whose request is traced
    is_abandoned: bool = False  # its last waiter has left; new waiters need a new load
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Turns:
    """Loads that wait for a slot, in one line per tenant: a tenant with many loads delays another's by one.

    A load that several tenants wait for stands in the line of each and starts with the first of their turns. A tenant
    without a waiting load takes no memory, and is last when it returns.
    """

    def __init__(self) -> None:
        requests: OrderedDict[str, list[Load]] = OrderedDict()  # tenants in order of turns, their loads of arrival
        prewarms: OrderedDict[str, list[Load]] = OrderedDict()
        self._lines = (requests, prewarms)  # none is empty

    def add(self, load: Load) -> None:
        """Put a load in the lines of those who wait for it."""
        load.is_in_line = True
        for tenant in load.tenants:
            self._enter(load, tenant)

    def remove(self, load: Load) -> None:
        """Take a load out of its lines, if it is in any."""
        if load.is_in_line:
            load.is_in_line = False
            for tenant in load.tenants:
                self._exit(load, tenant)

    def join(self, load: Load, tenant: str, *, is_prewarm: bool) -> None:
        """Count a tenant's new waiter."""
        if load.is_prewarm and not is_prewarm:
            was_in_line = load.is_in_line
            self.remove(load)
            load.is_prewarm = False
            if was_in_line:
                self.add(load)
        load.tenants[tenant] += 1
        if load.is_in_line and load.tenants[tenant] == 1:
            self._enter(load, tenant)

    def leave(self, load: Load, tenant: str) -> None:
        """Count a tenant's waiter that has left."""
        load.tenants[tenant] -= 1
        if not load.tenants[tenant]:
            if load.is_in_line:
                self._exit(load, tenant)
            del load.tenants[tenant]

    def take(self) -> Load | None:
        """The load whose turn it is, out of all lines; its tenant is then the last in turn. None: no load waits."""
        for lines in self._lines:
            for tenant, line in lines.items():
                load = line[0]
                self.remove(load)
                if tenant in lines:
                    lines.move_to_end(tenant)
                return load
        return None

    def excess(self, tenant: str) -> Load | None:
        """The load to give up for a tenant's request when there is no room: the latest in the longest line.

        None if that line would get shorter than the tenant's own, or if others wait for all its loads, too.
        """
        requests, _ = self._lines
        longest = max(requests.values(), key=len, default=[])
        if len(longest) < len(requests.get(tenant, [])) + 2:
            return None
        return next((load for load in reversed(longest) if len(load.tenants) == 1), None)

    def _enter(self, load: Load, tenant: str) -> None:
        insort(self._lines[load.is_prewarm].setdefault(tenant, []), load, key=_number)

    def _exit(self, load: Load, tenant: str) -> None:
        lines = self._lines[load.is_prewarm]
        line = lines[tenant]
        del line[bisect_left(line, load.number, key=_number)]
        if not line:
            del lines[tenant]
